-- A new run, or one that is known. ARGV: name, spec, digest, planned, the letters of rows that are done already ('' none).
-- -> created | same (its settings are the new ones) | changed (another manifest)
local name, spec, digest, planned, rows = unpack(ARGV)
local key = run_key(name)
local known = call('HGET', key, 'digest')
if known then
  if known ~= digest then return 'changed' end
  call('HSET', key, 'spec', spec)
  call('PERSIST', key)
  return 'same'
end
if rows == '' then rows = string.rep('.', tonumber(planned)) end
local _, packed = string.gsub(rows, 'p', '')
local _, done = string.gsub(rows, 'd', '')
local now = lane.num(lane.now())
call('SET', run_key(name, 'rows'), rows)
call('HSET', key, 'spec', spec, 'digest', digest, 'state', 'planned', 'planned', planned, 'created', now, 'cursor', 0,
     'done', done + packed)
call('ZADD', P .. 'runs', now, name)
return 'created'
