-- A new job: its record, its message and its first event, all or nothing.
-- -> {outcome, id, detail}: created | same | cancelled (a cancel came first) | conflict | late | full
local id, spec, digest, base = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local lane_name, most, deadline, run, tenant = ARGV[5], tonumber(ARGV[6]), ARGV[7], ARGV[8], ARGV[9]
local idem, quiet, extras = ARGV[10], ARGV[11], ARGV[12]
local low = tonumber(ARGV[13])
local tag, uuid, class, key, rows, eta, body = unpack(ARGV, 14, 20) -- the message; tags follow
local job_at = job_key(id)

-- A lane that was full stays closed until it has fallen to its low water, or producers at the brim would get in one
-- by one, each after many refusals. Interactive jobs have a tenth of the room beyond: a bulk run does not shut them out.
local function full()
  local backlog = call('HLEN', base .. ':m')
  if tonumber(class) == 0 then return backlog >= most + math.ceil(most / 10) end
  if backlog >= most then call('HSET', base .. ':s', 'full', '1') end
  return backlog >= most or (backlog > low and call('HEXISTS', base .. ':s', 'full') == 1)
end

if idem ~= '' then
  local owner = call('GET', P .. 'idem:' .. idem)
  local known = owner and owner ~= id and call('HMGET', job_key(owner), 'digest', 'state')
  if known and known[1] then
    if known[1] == digest then return {'same', owner, known[2]} end
    return {'conflict', owner, 'idempotency_key'}
  end
end
local known = call('HMGET', job_at, 'digest', 'state')
if known[1] then
  if known[1] ~= digest then return {'conflict', id, 'id'} end
  local message = lane.read(base, id)
  local mine = message and message.uuid == uuid -- this very call, sent a second time
  return {mine and 'created' or 'same', id, known[2]}
end

local now = lane.now()
if deadline ~= '' and tonumber(deadline) <= now then return {'late', id, ''} end
local doomed = call('EXISTS', P .. 'tomb:' .. id) == 1
if most > 0 and not doomed and full() then return {'full', id, call('HLEN', base .. ':m')} end

local at = lane.num(now)
local job = {state = 'queued', attempt = 0, at = at}
local fields = {'state', 'queued', 'digest', digest, 'lane', lane_name, 'at', at}
local function keep(name, value)
  if value == '' then return end
  job[name] = value
  fields[#fields + 1] = name
  fields[#fields + 1] = value
end
keep('run', run)
keep('quiet', quiet)
keep('deadline', deadline)
keep('idem', idem)
keep('extras', extras)
call('SET', spec_key(id), spec) -- the first write: a server without memory refuses it, and only a first one
if most > 0 and tonumber(class) > 0 then call('HDEL', base .. ':s', 'full') end
call('HSET', job_at, unpack(fields))
call('ZADD', index('queued'), at, id)
if run ~= '' then call('ZADD', P .. 'run:' .. run, at, id) end
if tenant ~= '' then call('ZADD', P .. 'tenant:' .. tenant, at, id) end
for i = 21, #ARGV do call('ZADD', P .. 'tag:' .. ARGV[i], at, id) end
if idem ~= '' then call('SET', P .. 'idem:' .. idem, id) end
if deadline ~= '' then call('ZADD', P .. 'deadlines', deadline, id) end
emit(id, job, 'submitted', '')
if doomed then
  call('DEL', P .. 'tomb:' .. id)
  return {'cancelled', id, stop(id, job)}
end
lane_put(base, tag, uuid, class, key, rows, eta, body)
return {'created', id, 'queued'}
