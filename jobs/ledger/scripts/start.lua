-- A worker takes the job up: the attempt counts one more, and any earlier one is fenced off.
-- `token` names the delivery; `put` is the number of the message it came with.
-- -> {started, attempt, spec, suspicions, digest, 1 if the attempt before this one crashed, 1 if it shall stop}
--    | {ended, state} | {stale} | {unknown}
-- An attempt that vanished may have written its manifest, and then the job can only succeed: so it does not end
-- here, and whoever takes it up looks into the store first.
local id, owner, token, put = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local job, key = read(id), job_key(id)
if not job then return {'unknown'} end
if TERMINAL[job.state] then return {'ended', job.state} end
if put ~= job.put then return {'stale'} end
local again = job.state == 'running' and job.token == token -- the call was sent twice
-- Only an attempt that was executing when its worker vanished makes the job a suspect. A worker that takes it up again
-- itself has lost its lease, not its life.
local crashed = not again and job.state == 'running' and job.step and not job.uploading and job.owner ~= owner
if not again then
  if not job.stop and job.deadline and tonumber(job.deadline) <= lane.now() then job.stop = 'deadline' end
  if job.stop and job.state == 'running' then call('HSET', key, 'stop', job.stop) end
  if job.stop and job.state == 'queued' then return {'ended', stop(id, job)} end
  if crashed then call('HINCRBY', key, 'suspicions', 1) end
  job.attempt = call('HINCRBY', key, 'attempt', 1)
  call('HSET', key, 'state', 'running', 'owner', owner, 'token', token, 'started', lane.num(lane.now()))
  call('HDEL', key, 'step', 'steps', 'uploading')
  if job.state == 'queued' then
    call('ZREM', index('queued'), id)
    call('ZADD', index('running'), job.at, id)
  end
  emit(id, job, 'started', '{"owner":' .. cjson.encode(owner) .. '}')
end
local v = call('HMGET', key, 'suspicions', 'digest')
return {'started', job.attempt, call('GET', spec_key(id)), tonumber(v[1] or 0), v[2], crashed and 1 or 0, job.stop and 1 or 0}
