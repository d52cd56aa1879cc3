-- What the scripts of runs share. Follows the ledger's common.lua: P, lane, call and forget are its.
--
--   P runs             zset  names by time of creation
--   P runs:R           hash  spec (JSON), state, why, planned, done, failed, rejected, cancelled, redrawn, cursor (the
--                            next row to queue), created, ended, spent (microseconds under a controller), renewed,
--                            resumed (what was spent then),
--                            batches and batched (rows that ran in them), bytes, pictures, closed (1 once a
--                            cancelled run has its report, or is given up)
--   P runs:R:rows      str   one letter a row, see ENDS; `.` waits to be queued, `q` is in the window
--   P runs:R:open      hash  job id -> row:draw of the window
--   P runs:R:picks     hash  row -> what was accepted of it, where that is not all of its first draw
--   P runs:R:made      hash  row -> what it has added to the sums (JSON), while it may be taken back: rows that are drawn
--                            again, did not come to be done, or are done and in no shard yet
--   P runs:R:kinds     hash  kind of failure -> how many
--   P runs:R:wrong     hash  row -> kind and message, of the first failures
--   P runs:R:sizes     hash  size of a batch -> rows that ran in such
--   P runs:R:gates     hash  gate -> pictures that it refused
--   P runs:R:pace      hash  ten seconds -> rows ended in them
--   P runs:R:lease     str   the controller's token
-- A run is settled by one controller at a time; a script that has its token does nothing under another one.

local ENDS = {d = 'done', p = 'done', f = 'failed', r = 'rejected', c = 'cancelled'} -- p: done, and in a shard
local MOST_WRONG = 1000

local function run_key(name, part) return P .. 'runs:' .. name .. (part and ':' .. part or '') end

local function mine(name, token, ttl)
  if call('GET', run_key(name, 'lease')) ~= token then return false end
  call('PEXPIRE', run_key(name, 'lease'), ttl)
  return true
end

-- Moves a row and keeps the counts; what it was before, '' when there is no such row.
local function move(name, n, to)
  local key, from = run_key(name, 'rows'), call('GETRANGE', run_key(name, 'rows'), n, n)
  if from == '' or from == to then return from end
  call('SETRANGE', key, n, to)
  local old, new = ENDS[from], ENDS[to]
  if old ~= new then
    if old then call('HINCRBY', run_key(name), old, -1) end
    if new then call('HINCRBY', run_key(name), new, 1) end
  end
  return from
end

local function complete(name)
  local counts = call('HMGET', run_key(name), 'planned', 'done', 'failed', 'rejected', 'cancelled')
  local ended = 0
  for i = 2, 5 do ended = ended + (tonumber(counts[i]) or 0) end
  return ended == tonumber(counts[1]) and call('HLEN', run_key(name, 'open')) == 0
end

-- Counts in a hash; what is at nothing again is not there.
local function bump(key, field, by)
  if call('HINCRBY', key, field, by) == 0 then call('HDEL', key, field) end
end

-- Adds to the run's sums what a row has made, or takes it from them. `one`: {slot, batch, bytes, pictures, redrawn, gates}.
local function sum(name, one, sign)
  local key = run_key(name)
  if one.slot then bump(run_key(name, 'pace'), one.slot, sign) end
  if one.batch then
    call('HINCRBYFLOAT', key, 'batches', sign / one.batch)
    call('HINCRBY', key, 'batched', sign)
    bump(run_key(name, 'sizes'), one.batch, sign)
  end
  for _, field in ipairs({'bytes', 'pictures', 'redrawn'}) do
    if one[field] then call('HINCRBY', key, field, sign * one[field]) end
  end
  for gate, count in pairs(one.gates or {}) do bump(run_key(name, 'gates'), gate, sign * count) end
end

local function made(name, n)
  local text = call('HGET', run_key(name, 'made'), n)
  return text and cjson.decode(text) or {}
end

-- Keeps what a row has made, before and now, where it may be taken back.
local function remember(name, n, before, adds, keep)
  if not keep then return call('HDEL', run_key(name, 'made'), n) end
  local all = {slot = adds.slot, batch = adds.batch, gates = before.gates or {}}
  for _, field in ipairs({'bytes', 'pictures', 'redrawn'}) do
    all[field] = (before[field] or 0) + (adds[field] or 0)
    if all[field] == 0 then all[field] = nil end
  end
  for gate, count in pairs(adds.gates) do all.gates[gate] = (all.gates[gate] or 0) + count end
  if next(all.gates) == nil then all.gates = nil end
  call('HSET', run_key(name, 'made'), n, cjson.encode(all))
end

local function take_back(name, n)
  sum(name, made(name, n), -1)
  call('HDEL', run_key(name, 'made'), n)
end
