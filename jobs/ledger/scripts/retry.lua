-- Another attempt under a new message. From a worker (`attempt` given): of the running attempt.
-- From a producer (`attempt` ''): of a failed, cancelled or expired job, its history kept, its suspicions dropped.
-- `put` is the number of the new message: one more than the one the caller saw. A worker's comes to its old
-- place, `delay` microseconds from now by this server's clock.
-- `spec`: a worker's is the job completed by its card, whose batch key the message has; a producer's is the job without
-- its deadline, kept if that is over: whoever tries again by hand wants it still.
-- `suspicions`: how often the worker's ranks died while they executed it, which it outlived itself.
-- -> state after it | fenced | unknown | changed (read again) | refused STATE
local id, attempt, put, base, data, delay = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5], tonumber(ARGV[6])
local spec = ARGV[7]
local tag, uuid, class, batch_key, rows, eta, body = unpack(ARGV, 8, 14)
local suspicions = tonumber(ARGV[15] or 0)
local job, key = read(id), job_key(id)
if not job then return 'unknown' end
local mine = attempt == '' or job.attempt == tonumber(attempt)
if job.state == 'queued' and job.put == put and mine then return 'queued' end -- sent twice
if attempt ~= '' then
  if job.state ~= 'running' or not mine then return 'fenced' end
  if job.stop then return stop(id, job) end
elseif job.state ~= 'failed' and job.state ~= 'cancelled' and job.state ~= 'expired' then
  return 'refused ' .. job.state
end
if job.put + 1 ~= put then return 'changed' end

local overdue = job.deadline and tonumber(job.deadline) <= lane.now()
if attempt ~= '' or overdue then call('SET', spec_key(id), spec) end
if attempt == '' then
  lane_drop_dead(base, id) -- a dead letter would bury the job again
  if overdue then
    call('HDEL', key, 'deadline')
    job.deadline = nil
  end
  call('HDEL', key, 'ended', 'error', 'suspicions', 'dead')
  call('PERSIST', key)
  call('PERSIST', spec_key(id))
  if not job.run then call('PERSIST', stream_of(id, job)) end
  if job.idem then call('SET', P .. 'idem:' .. job.idem, id) end
  if job.deadline then call('ZADD', P .. 'deadlines', job.deadline, id) end
  call('ZREM', P .. 'dead', id)
  call('DEL', META .. id) -- Celery: pending again
end
call('HSET', key, 'put', put)
if suspicions > 0 then call('HINCRBY', key, 'suspicions', suspicions) end
to_queued(id, job)
emit(id, job, 'retrying', data)
if delay > 0 then eta = lane.num(lane.now() + delay) end
lane_put(base, tag, uuid, class, batch_key, rows, eta, body, attempt ~= '' and job.at or nil)
return 'queued'
