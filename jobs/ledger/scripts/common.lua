-- What the ledger's scripts share: where things lie, and the two moves every transition is made of,
-- `emit` and `finish`. Runs after the lane library and after the settings baked in by script.py:
-- P (key prefix), META (prefix of Celery's results), *_TTL (milliseconds), JOB_EVENTS and RUN_EVENTS.
--
--   P job:ID        hash   one job (fields below). Its values are short, so that Redis keeps it packed:
--   P spec:ID, P result:ID   str    what is long, as JSON
--   P state:S       zset   ids by state; open ones by time of submit, ended ones by time of end
--   P run:R tag:T tenant:N   zset  ids by time of submit
--   P idem:N:K      str    idempotency key of tenant N -> id
--   P tomb:ID       str    a cancel that came before its job
--   P deadlines     zset   ids of open jobs by deadline
--   P dead          zset   ids of jobs given up, by time
--   P events:job:ID, events:run:R   stream;  events:run:R:n  how many events the run had
--   P cancel               pub/sub channel: ids of running jobs that shall stop
--
-- Fields: state, digest, lane, at (time of submit); and where they apply attempt, put (which message is
-- the valid one, absent: 1), token and owner (of the running attempt), started, ended, step and steps, stop
-- (cancel or deadline), suspicions, dead, error, deadline, run, quiet (a bulk job of a run), idem,
-- extras (what its message carries beside the id), seq (of its last event), uploading (nothing executes any more).
-- Times are microseconds of this server's clock.

local TERMINAL = {succeeded = true, failed = true, cancelled = true, expired = true}
local ALWAYS_SEEN = {submitted = true, succeeded = true, failed = true, cancelled = true, expired = true}
local SLACK = 86400000 -- a record outlives its time by a day at most when nothing prunes

local function job_key(id) return P .. 'job:' .. id end
local function spec_key(id) return P .. 'spec:' .. id end
local function result_key(id) return P .. 'result:' .. id end
local function index(state) return P .. 'state:' .. state end

local FIELDS = {'state', 'attempt', 'put', 'token', 'stop', 'deadline', 'run', 'quiet', 'idem', 'lane', 'at', 'step',
                'uploading', 'owner'}

-- The fields that transitions look at, or nil for an unknown job.
local function read(id)
  local v = call('HMGET', job_key(id), unpack(FIELDS))
  if not v[1] then return nil end
  local job = {}
  for i, name in ipairs(FIELDS) do job[name] = v[i] or nil end
  job.attempt = tonumber(job.attempt or 0)
  job.put = tonumber(job.put or 1)
  return job
end

-- All that is known of a job, as field, value, ...; empty when it is unknown.
local function whole(id)
  local record = call('HGETALL', job_key(id))
  local spec = #record > 0 and call('GET', spec_key(id))
  if not spec then return {} end
  record[#record + 1] = 'spec'
  record[#record + 1] = spec
  local result = call('GET', result_key(id))
  if result then
    record[#record + 1] = 'result'
    record[#record + 1] = result
  end
  return record
end

-- A stream's first block takes 4 KB whatever is in it; a copy takes what it needs.
local function shrink(key)
  call('COPY', key, key .. ':copy', 'REPLACE')
  call('RENAME', key .. ':copy', key)
end

local function stream_of(id, job)
  return job.run and (P .. 'events:run:' .. job.run) or (P .. 'events:job:' .. id)
end

-- One event. `data` is JSON of what the event adds to job, attempt and sequence, or ''.
local function emit(id, job, kind, data)
  if job.quiet and not ALWAYS_SEEN[kind] then return end
  local key, seq = stream_of(id, job), call('HINCRBY', job_key(id), 'seq', 1)
  if job.run then
    local number = call('INCR', key .. ':n') -- so that a reader sees what was trimmed away
    call('PEXPIRE', key .. ':n', EVENT_TTL)
    call('XADD', key, 'MAXLEN', '~', RUN_EVENTS, '*',
         'type', kind, 'job', id, 'attempt', job.attempt, 'sequence', seq, 'number', number, 'data', data)
  else
    call('XADD', key, 'MAXLEN', '~', JOB_EVENTS, '*',
         'type', kind, 'attempt', job.attempt, 'sequence', seq, 'data', data)
    if seq == 1 then shrink(key) end
  end
  if job.run or TERMINAL[kind] then call('PEXPIRE', key, EVENT_TTL) end
end

-- ISO 8601 of microseconds. Days to date after Howard Hinnant, "chrono-compatible low-level date algorithms".
local function iso(us)
  local s = math.floor(us / 1e6)
  local z = math.floor(s / 86400) + 719468
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local mp = math.floor((5 * doy + 2) / 153)
  local day, month = doy - math.floor((153 * mp + 2) / 5) + 1, mp < 10 and mp + 3 or mp - 9
  local year, rest = yoe + era * 400 + (month <= 2 and 1 or 0), s % 86400
  return string.format('%04d-%02d-%02dT%02d:%02d:%02d.%06d+00:00', year, month, day,
                       math.floor(rest / 3600), math.floor(rest % 3600 / 60), rest % 60, us % 1e6)
end

-- Celery's result, as its Redis backend stores it. `result` is JSON.
local function celery_result(id, status, result, now)
  local meta = '{"status": "' .. status .. '", "result": ' .. result .. ', "traceback": null, "children": [], '
    .. '"date_done": "' .. iso(now) .. '", "task_id": "' .. id .. '"}'
  call('PSETEX', META .. id, RESULT_TTL, meta)
  call('PUBLISH', META .. id, meta)
end

local function revoked(reason)
  return '{"exc_type": "TaskRevokedError", "exc_message": ["' .. reason .. '"], "exc_module": "celery.exceptions"}'
end

-- Everything that is kept of an ended job.
local function forget(id)
  local key = job_key(id)
  local spec, idem = call('GET', spec_key(id)), call('HGET', key, 'idem')
  if spec then
    local job = cjson.decode(spec)
    if job.run then call('ZREM', P .. 'run:' .. job.run, id) end
    if job.tenant then call('ZREM', P .. 'tenant:' .. job.tenant, id) end
    for _, tag in ipairs(job.tags or {}) do call('ZREM', P .. 'tag:' .. tag, id) end
  end
  if idem and call('GET', P .. 'idem:' .. idem) == id then call('DEL', P .. 'idem:' .. idem) end
  call('ZREM', P .. 'dead', id)
  call('DEL', key, spec_key(id), result_key(id), P .. 'events:job:' .. id)
end

-- Forgets at most `most` of the jobs that ended in this state longer ago than records are kept.
local function prune(state, now, most)
  local old = call('ZRANGEBYSCORE', index(state), '-inf', lane.num(now - RECORD_TTL * 1000), 'LIMIT', 0, most)
  for _, id in ipairs(old) do
    forget(id)
    call('ZREM', index(state), id)
  end
  return #old
end

-- The end of a job. `how`: result or error to store, status and result for Celery (`celery`), data of the event.
local function finish(id, job, state, how)
  local key, now = job_key(id), lane.now()
  call('HSET', key, 'state', state, 'ended', lane.num(now))
  if how.error then call('HSET', key, 'error', how.error) end
  if how.result then call('SET', result_key(id), how.result, 'PX', RECORD_TTL + SLACK) end
  call('HDEL', key, 'token', 'stop')
  call('ZREM', index(job.state), id)
  call('ZADD', index(state), lane.num(now), id)
  if job.deadline then call('ZREM', P .. 'deadlines', id) end
  if job.idem then call('PEXPIRE', P .. 'idem:' .. job.idem, RECORD_TTL + SLACK) end
  call('PEXPIRE', key, RECORD_TTL + SLACK)
  call('PEXPIRE', spec_key(id), RECORD_TTL + SLACK)
  emit(id, job, state, how.data or '')
  celery_result(id, how.status, how.celery, now)
  prune(state, now, 2) -- each end makes room: no sweep is needed to stay bounded
end

-- Ends a job that shall stop: by its deadline, or because somebody cancelled it.
local function stop(id, job)
  local state = job.stop == 'deadline' and 'expired' or 'cancelled'
  finish(id, job, state, {status = 'REVOKED', celery = revoked(state)})
  return state
end

-- Back among the waiting, at its old place. The message is the caller's business.
local function to_queued(id, job)
  call('HSET', job_key(id), 'state', 'queued')
  call('HDEL', job_key(id), 'token', 'owner', 'step', 'steps', 'uploading')
  call('ZREM', index(job.state), id)
  call('ZADD', index('queued'), job.at, id)
end

-- From where a page begins that follows (score, id) in a zset, by rank; the id may have left since.
local function rank_after(key, newest, score, id)
  if score == '' then return 0 end
  local rank = call(newest and 'ZREVRANK' or 'ZRANK', key, id)
  if rank then return rank + 1 end
  if newest then return call('ZCOUNT', key, score, '+inf') end
  return call('ZCOUNT', key, '-inf', score)
end
