-- The end of the running attempt; with `attempt` '' the end of whatever is open.
-- `attempt` '' and `dead`: because its message is a dead letter, which goes. The job lives on when it has none (any
-- more) or another message.
-- -> {1, state}, also when sent twice | {0, state or ''}: fenced, somebody else's end stands
local id, attempt, state, result, error_, status, celery, data, dead = unpack(ARGV)
local job = read(id)
if not job then return {0, ''} end
if attempt == '' and dead == '1' then
  local base = P .. job.lane
  if lane_drop_dead(base, id) == 0 or lane.find(base, id) then return {0, job.state} end
end
local mine = attempt == '' or job.attempt == tonumber(attempt)
if TERMINAL[job.state] then return {mine and attempt ~= '' and job.state == state and 1 or 0, job.state} end
if not mine or (attempt ~= '' and job.state ~= 'running') then return {0, job.state} end
if state == 'cancelled' and job.stop == 'deadline' then state = 'expired' end
if dead == '1' then
  call('HSET', job_key(id), 'dead', '1')
  call('ZADD', P .. 'dead', lane.num(lane.now()), id)
end
finish(id, job, state, {
  result = result ~= '' and result, error = error_ ~= '' and error_, data = data,
  status = status, celery = celery ~= '' and celery or revoked(state),
})
return {1, state}
