-- Another state. ARGV: name, state, why, token of a controller or '', states it may come from.
-- -> the state it is in now | unknown | lost (another controller has it)
local name, to, why, token = unpack(ARGV, 1, 4)
local key = run_key(name)
local state = call('HGET', key, 'state')
if not state then return 'unknown' end
local holder = call('GET', run_key(name, 'lease'))
if token ~= '' and holder and holder ~= token then return 'lost' end
if to == 'done' and not complete(name) then return state end -- a row was put back at this moment
for i = 5, #ARGV do
  if state == ARGV[i] then
    call('HSET', key, 'state', to, 'why', why)
    call('HDEL', key, 'closed')
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
