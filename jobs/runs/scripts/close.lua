-- A cancelled run has what comes last, or is given up. ARGV: name, token, ttl. -> yes | lost
local name, token, ttl = unpack(ARGV)
if not mine(name, token, ttl) then return 'lost' end
if call('HGET', run_key(name), 'state') == 'cancelled' then call('HSET', run_key(name), 'closed', 1) end
return 'yes'
