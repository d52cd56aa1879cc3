-- More rows at the end. ARGV: name, token, ttl, spec, digest before, digest, how many rows.
-- -> yes | lost | changed (it is not what the caller has read)
local name, token, ttl, spec, before, digest, more = unpack(ARGV)
local key = run_key(name)
if not mine(name, token, ttl) then return 'lost' end
local known = call('HGET', key, 'digest')
if known == digest then return 'yes' end -- sent twice
if known ~= before then return 'changed' end
call('APPEND', run_key(name, 'rows'), string.rep('.', tonumber(more)))
call('HINCRBY', key, 'planned', more)
call('HSET', key, 'spec', spec, 'digest', digest, 'state', 'running', 'cursor', 0)
call('HDEL', key, 'why', 'ended', 'closed')
return 'yes'
