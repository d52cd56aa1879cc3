-- Ends waiting jobs whose deadline is over and tells running ones to stop. -> how many
local over = call('ZRANGEBYSCORE', P .. 'deadlines', '-inf', lane.num(lane.now()), 'LIMIT', 0, ARGV[1])
for _, id in ipairs(over) do
  local job = read(id)
  call('ZREM', P .. 'deadlines', id)
  if job and job.state == 'queued' then
    job.stop = 'deadline'
    stop(id, job)
    lane_expedite(P .. job.lane, id)
  elseif job and job.state == 'running' then
    call('HSETNX', job_key(id), 'stop', 'deadline') -- a cancel before it stays one
    call('PUBLISH', P .. 'cancel', id)
  end
end
return #over
