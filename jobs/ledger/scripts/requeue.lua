-- The attempt is given back and its message with it (by the transport): no fault of the job's.
-- -> state after it | fenced
local id, attempt, data = unpack(ARGV)
local job = read(id)
if not job or job.attempt ~= tonumber(attempt) then return 'fenced' end
if job.state ~= 'running' then return job.state == 'queued' and 'queued' or 'fenced' end
if job.stop then return stop(id, job) end
to_queued(id, job)
emit(id, job, 'requeued', data)
return 'queued'
