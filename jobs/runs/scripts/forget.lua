-- Ended jobs of a run whose rows are settled leave Redis before their time, and old events go. ARGV: run, token, ttl,
-- how many events stay, ids ... -> how many | lost
if not mine(unpack(ARGV, 1, 3)) then return 'lost' end
local count = 0
for i = 5, #ARGV do
  local state = call('HGET', job_key(ARGV[i]), 'state')
  if state and TERMINAL[state] then
    forget(ARGV[i])
    call('ZREM', index(state), ARGV[i])
    call('DEL', META .. ARGV[i])
    count = count + 1
  end
end
call('XTRIM', P .. 'events:run:' .. ARGV[1], 'MAXLEN', '~', ARGV[4])
return count
