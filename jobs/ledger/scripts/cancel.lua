-- ARGV: id, '1' to leave a running job alone.
-- -> {unknown} (remembered: the job will end as it comes) | {ended, state} | {cancelled} | {requested, owner}
local id = ARGV[1]
local job = read(id)
if not job then
  call('SET', P .. 'tomb:' .. id, '1', 'PX', TOMB_TTL)
  return {'unknown', ''}
end
if TERMINAL[job.state] then return {'ended', job.state} end
if job.state == 'queued' then
  stop(id, job)
  lane_expedite(P .. job.lane, id) -- a worker takes the message out, and with it Celery's links
  return {'cancelled', ''}
end
if ARGV[2] == '1' then return {'requested', ''} end
if not job.stop then call('HSET', job_key(id), 'stop', 'cancel') end
call('PUBLISH', P .. 'cancel', id)
return {'requested', call('HGET', job_key(id), 'owner') or ''}
