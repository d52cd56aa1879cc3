-- Picks messages of one batch key and leases them, in one step.
-- ARGV: who, token, open key, its room (rows), rows wanted, seats (messages), highest class allowed.
-- No rows wanted: only the open group is topped up.
-- Returns {} or {key, class, tag, delivery, rows, body, tag, delivery, ...}.
-- The order is: the highest class; the open group, whatever its age; and when a new batch begins, a key whose
-- oldest message waits longer than the bound, the oldest key that fills a batch, the oldest key.
local B = KEYS[1]
local who, token, open, room = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local wanted, seats, lowest = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local now = lane.now()

-- The key, and how many rows of it. Sharing between the tenants or runs of a class would have its place here,
-- among the keys that are neither open nor overdue.
local function pick(C)
  if open ~= '' and call('ZSCORE', B .. ':k:' .. C, open) then return open, room end
  local rows = math.min(wanted, lane.setting(B, 'max_batch'))
  local oldest = call('ZRANGE', B .. ':k:' .. C, 0, 0, 'WITHSCORES')
  if now - tonumber(oldest[2]) > lane.setting(B, 'age_bound') then return oldest[1], rows end
  return call('ZRANGE', B .. ':f:' .. C, 0, 0)[1] or oldest[1], rows
end

-- The tags and records that fit: the first always does, so that no message is too large to be served.
local function choose(waiting, budget)
  local chosen, rows = {}, 0
  for i, tag in ipairs(call('ZRANGE', waiting, 0, math.min(seats, budget) - 1)) do
    local m = lane.read(B, tag)
    if i > 1 and rows + m.rows > budget then break end
    chosen[i], rows = {tag, m}, rows + m.rows
  end
  return chosen, rows
end

local function reply(key, C, tags)
  local out = {key, C}
  for _, tag in ipairs(tags) do
    local m = lane.read(B, tag)
    if m and m.owner == who and call('ZSCORE', B .. ':l', tag) then
      for _, v in ipairs({tag, m.n, m.rows, m.body}) do out[#out + 1] = v end
    end
  end
  return #out > 2 and out or {}
end

local claim = call('LRANGE', B .. ':t:' .. token, 0, -1)
if #claim > 0 then return reply(table.remove(claim, 1), tonumber(table.remove(claim, 1)), claim) end

lane.due(B, now)
local C = call('ZRANGE', B .. ':c', 0, 0)[1]
if not C or tonumber(C) > lowest then
  call('SET', B .. (lowest > 0 and ':h' or ':u'), '1')
  return {}
end
local key, budget = pick(C)
if budget < 1 then
  call('SET', B .. ':h', '1')
  return {}
end
local waiting, till = B .. ':w:' .. C .. ':' .. key, lane.num(now + lane.setting(B, 'lease'))
local chosen, rows = choose(waiting, budget)
local tags, out = {}, {key, tonumber(C)}
for i, c in ipairs(chosen) do
  local tag, m = c[1], c[2]
  lane.lease(B, tag, m, who, till)
  tags[i] = tag
  for _, v in ipairs({tag, m.n, m.rows, m.body}) do out[#out + 1] = v end
end
call('ZREM', waiting, unpack(tags))
call('ZREM', B .. ':a:' .. C, unpack(tags))
lane.settle(B, C, key, -rows)
call('ZADD', B .. ':p', lane.num(now), who)
call('RPUSH', B .. ':t:' .. token, key, C, unpack(tags))
call('EXPIRE', B .. ':t:' .. token, 60)
return out
