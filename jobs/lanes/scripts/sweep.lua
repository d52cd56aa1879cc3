-- Brings back what nobody works on any more: leases that ran out, leases of processes not heard of.
-- ARGV: a process known to be dead, or ''. Returns {number returned, dead tag, dead tag, ...}.
-- Nothing is taken while processes may not have had the chance to be heard: for a full lease after the server
-- restarted, for the liveness time after nobody swept for a while (a frozen server looks like that).
local B, gone, now, GAP = KEYS[1], ARGV[1], lane.now(), 5e6
local liveness = lane.setting(B, 'liveness')
local out = {lane.due(B, now)}

local function run_id()
  local info = redis.pcall('INFO', 'server')
  return type(info) == 'string' and string.match(info, 'run_id:(%w+)') or ''
end

local function held_until()
  local s = call('HMGET', B .. ':s', 'at', 'run', 'hold')
  local at, run, hold = tonumber(s[1]), run_id(), tonumber(s[3]) or 0
  if s[2] and s[2] ~= run then
    hold = now + lane.setting(B, 'lease')
  elseif at and now - at > GAP then
    hold = math.max(hold, now + liveness)
  end
  call('HSET', B .. ':s', 'at', lane.num(now), 'run', run, 'hold', lane.num(hold))
  return hold
end

local function back(tag)
  local m = lane.read(B, tag)
  if not m then
    call('ZREM', B .. ':l', tag)
  elseif lane.release(B, tag, m) then
    if lane.back(B, tag, m, 0, now) == 2 then out[#out + 1] = tag else out[1] = out[1] + 1 end
  end
end

local function bury(who)
  for _, tag in ipairs(call('SMEMBERS', B .. ':o:' .. who)) do back(tag) end
  call('ZREM', B .. ':p', who)
  call('DEL', B .. ':o:' .. who)
end

if gone ~= '' then bury(gone) end
if now < held_until() then return out end
for _, tag in ipairs(call('ZRANGEBYSCORE', B .. ':l', '-inf', lane.num(now), 'LIMIT', 0, 500)) do back(tag) end
for _, who in ipairs(call('ZRANGEBYSCORE', B .. ':p', '-inf', lane.num(now - liveness), 'LIMIT', 0, 20)) do
  bury(who)
end
return out
