-- Where the attempt is. `kind` '' records without an event.
-- -> go | cancel | deadline (stop at the next step) | fenced (the attempt is no longer the current one)
local id, attempt, step, steps, kind, data = unpack(ARGV)
local job = read(id)
if not job or job.state ~= 'running' or job.attempt ~= tonumber(attempt) then return 'fenced' end
call('HSET', job_key(id), 'step', step, 'steps', steps)
if kind == 'uploading' then call('HSET', job_key(id), 'uploading', '1') end
if kind ~= '' then emit(id, job, kind, data) end
return job.stop or 'go'
