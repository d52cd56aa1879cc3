-- Another state. ARGV: name, state, why, states it may come from. -> the state it is in now | unknown
local name, to, why = unpack(ARGV, 1, 3)
local key = run_key(name)
local state = call('HGET', key, 'state')
if not state then return 'unknown' end
for i = 4, #ARGV do
  if state == ARGV[i] then
    call('HSET', key, 'state', to, 'why', why)
    if to == 'running' then
      call('HDEL', key, 'ended')
      call('HSET', key, 'resumed', call('HGET', key, 'spent') or 0) -- a budget of time is of this round
    else
      call('HSET', key, 'ended', lane.num(lane.now()))
    end
    return to
  end
end
return state
