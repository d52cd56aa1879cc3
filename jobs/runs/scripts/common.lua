-- What the scripts of runs share. Follows the ledger's common.lua: P, lane, call and forget are its.
--
--   P runs             zset  names by time of creation
--   P runs:R           hash  spec (JSON), state, why, planned, done, failed, rejected, cancelled, redrawn, cursor (the
--                            next row to queue), created, ended, spent (microseconds under a controller), renewed,
--                            resumed (what was spent then),
--                            batches and batched (rows that ran in them), bytes
--   P runs:R:rows      str   one letter a row, see ENDS; `.` waits to be queued, `q` is in the window
--   P runs:R:open      hash  job id -> row:draw of the window
--   P runs:R:picks     hash  row -> what was accepted of it, where that is not all of its first draw
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
