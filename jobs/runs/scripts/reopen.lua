-- A run that is done goes on. ARGV: name. -> 1 | 0 it was not done
local key = run_key(ARGV[1])
if call('HGET', key, 'state') ~= 'done' then return 0 end
call('HSET', key, 'state', 'running')
call('HDEL', key, 'ended')
return 1
