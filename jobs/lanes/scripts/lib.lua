-- The structure of a lane: what is waiting, in which order, and how a message gets there.
--
-- All keys derive from the base B = key prefix .. lane name:
--   B:m       hash  tag -> record (see lane.pack)
--   B:c       zset  classes that have waiting messages, lowest number first
--   B:a:C     zset  waiting tags of class C by age            (position, highest class)
--   B:k:C     zset  batch keys of class C by their oldest waiting message
--   B:f:C     zset  those of them whose waiting rows fill a batch
--   B:r:C     hash  batch key -> rows waiting
--   B:w:C:K   zset  waiting tags of batch key K by age
--   B:d       zset  not yet due: tag by due time
--   B:l       zset  leased: tag by end of lease
--   B:p       zset  processes that hold leases, by last sign of life
--   B:o:W     set   tags leased to process W
--   B:x       zset  dead letters: tag by time of death
--   B:id      hash  id -> tag, for the rare id that has two messages (a retry published while leased)
--   B:t:T     str   what claim T was given, for a fetch that is sent twice (a minute)
--   B:cfg     hash  settings, see lane.defaults
--   B:s       hash  the sweeper's memory
--   B:h B:u   str   a fetch found nothing / nothing urgent: ring the bell at the next put
--   B:bell          pub/sub channel
-- Times are microseconds of this server's clock. Every function takes B first.
local lane = {}
local call = redis.call
local SEP = '\31'
local RECORD = '^' .. string.rep('([^\31]*)\31', 8) .. '(.*)$'

lane.defaults = {max_batch = 8, age_bound = 60e6, lease = 60e6, liveness = 15e6, max_deliveries = 5}

function lane.now()
  local t = call('TIME')
  return t[1] * 1000000 + t[2]
end

function lane.num(x) return string.format('%.0f', x) end

function lane.setting(B, name)
  return tonumber(call('HGET', B .. ':cfg', name)) or lane.defaults[name]
end

-- A record is one string, its fields joined by the unit separator. `n` counts deliveries (the fencing
-- number), `free` those of them that do not count against the limit, `owner` is who has or had the lease.
function lane.pack(m)
  return table.concat({m.class, lane.num(m.at), m.rows, m.n, m.free, m.uuid, m.owner, m.key, m.body}, SEP)
end

function lane.read(B, tag)
  local v = call('HGET', B .. ':m', tag)
  if not v then return nil end
  local class, at, rows, n, free, uuid, owner, key, body = string.match(v, RECORD)
  return {class = tonumber(class), at = tonumber(at), rows = tonumber(rows), n = tonumber(n),
          free = tonumber(free), uuid = uuid, owner = owner, key = key, body = body}
end

function lane.write(B, tag, m) call('HSET', B .. ':m', tag, lane.pack(m)) end

-- Brings class C's indexes up to date after the waiting messages of key K changed by `rows`.
function lane.settle(B, C, K, rows)
  local keys, full, counts = B .. ':k:' .. C, B .. ':f:' .. C, B .. ':r:' .. C
  local head = call('ZRANGE', B .. ':w:' .. C .. ':' .. K, 0, 0, 'WITHSCORES')
  if #head == 0 then
    call('ZREM', keys, K)
    call('ZREM', full, K)
    call('HDEL', counts, K)
    if call('ZCARD', keys) == 0 then call('ZREM', B .. ':c', C) end
    return
  end
  call('ZADD', keys, head[2], K)
  if call('HINCRBY', counts, K, rows) >= lane.setting(B, 'max_batch') then
    call('ZADD', full, head[2], K)
  else
    call('ZREM', full, K)
  end
end

function lane.add(B, tag, m)
  local at = lane.num(m.at)
  call('ZADD', B .. ':w:' .. m.class .. ':' .. m.key, at, tag)
  call('ZADD', B .. ':a:' .. m.class, at, tag)
  call('ZADD', B .. ':c', m.class, m.class)
  lane.settle(B, m.class, m.key, m.rows)
end

-- Takes a tag out of the waiting ones; false when it was not waiting.
function lane.remove(B, tag, m)
  if call('ZREM', B .. ':w:' .. m.class .. ':' .. m.key, tag) == 0 then return false end
  call('ZREM', B .. ':a:' .. m.class, tag)
  lane.settle(B, m.class, m.key, -m.rows)
  return true
end

function lane.ring(B, class)
  local hungry = call('DEL', B .. ':h')
  if class <= 0 then hungry = hungry + call('DEL', B .. ':u') end
  if hungry > 0 then call('PUBLISH', B .. ':bell', 'put') end
end

-- Puts a message where its time says: among the waiting ones, or aside until `due`.
function lane.place(B, tag, m, due, now)
  if due > now then
    call('ZADD', B .. ':d', lane.num(due), tag)
  else
    lane.add(B, tag, m)
    lane.ring(B, m.class)
  end
end

-- The tag of an id: the waiting one of its messages, else the leased one, else a dead letter; nil when there is none.
function lane.find(B, id)
  local other = call('HGET', B .. ':id', id)
  if call('HEXISTS', B .. ':m', id) == 0 then return other or nil end
  local aside = call('ZSCORE', B .. ':x', id) or call('ZSCORE', B .. ':l', id)
  if other and aside and not call('ZSCORE', B .. ':x', other) then return other end
  return id
end

function lane.forget(B, tag)
  call('HDEL', B .. ':m', tag)
  local id = string.match(tag, '^(.*)~[^~]*$')
  if id and call('HGET', B .. ':id', id) == tag then call('HDEL', B .. ':id', id) end
end

-- Forgets the dead letters of an id. Returns their number.
function lane.drop_dead(B, id)
  local count = 0
  for _, tag in ipairs({id, call('HGET', B .. ':id', id) or nil}) do
    if call('ZREM', B .. ':x', tag) == 1 then
      lane.forget(B, tag)
      count = count + 1
    end
  end
  return count
end

-- Stores a message. Returns 1, or 0 when this very message (tag and uuid) is already there.
-- Another message with the same tag is kept and the new one stored beside it: a task that retries
-- publishes its id again while the first delivery is still leased. `at` (a time, or nil for now) is its place.
function lane.put(B, tag, uuid, class, key, rows, eta, body, at)
  local old = lane.read(B, tag)
  if old then
    local other = tag .. '~' .. uuid
    if old.uuid == uuid or call('HEXISTS', B .. ':m', other) == 1 then return 0 end
    call('HSET', B .. ':id', tag, other)
    tag = other
  end
  local now, due = lane.now(), tonumber(eta)
  local m = {class = tonumber(class), at = tonumber(at) or math.max(now, due), rows = tonumber(rows), n = 0, free = 0,
             uuid = uuid, owner = '', key = key, body = body}
  lane.write(B, tag, m)
  lane.place(B, tag, m, due, now)
  return 1
end

-- How many waiting messages come before this id by class and age (0 = next); nil when it does not wait.
-- Batching by key may serve a later message of a running batch's key first.
function lane.position(B, id)
  local tag = lane.find(B, id)
  local m = tag and lane.read(B, tag)
  local rank = m and call('ZRANK', B .. ':a:' .. m.class, tag)
  if not rank then return nil end
  for _, C in ipairs(call('ZRANGEBYSCORE', B .. ':c', '-inf', '(' .. m.class)) do
    rank = rank + call('ZCARD', B .. ':a:' .. C)
  end
  return rank
end

-- Moves a waiting or not yet due message to the head of the lane. Returns 1, or 0 when it does neither.
function lane.expedite(B, id)
  local tag = lane.find(B, id)
  local m = tag and lane.read(B, tag)
  if not m or not (lane.remove(B, tag, m) or call('ZREM', B .. ':d', tag) == 1) then return 0 end
  m.class = -1
  lane.write(B, tag, m)
  lane.add(B, tag, m)
  lane.ring(B, -1)
  return 1
end

-- For scripts of others that are made of this library and their own text.
local lane_put, lane_position, lane_expedite, lane_drop_dead = lane.put, lane.position, lane.expedite, lane.drop_dead
