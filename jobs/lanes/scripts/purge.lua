-- Forgets what waits or is not yet due, and with ARGV[1] = '1' also what is leased or dead: a part of it at a
-- call, so that the server is not blocked. Returns the number forgotten; 0 = done.
local B, all, PART = KEYS[1], ARGV[1] == '1', 2000
local count = 0

local function tags_of(set) return call('ZRANGE', set, 0, PART - count - 1) end

for _, C in ipairs(call('ZRANGE', B .. ':c', 0, -1)) do
  for _, tag in ipairs(count < PART and tags_of(B .. ':a:' .. C) or {}) do
    lane.remove(B, tag, lane.read(B, tag))
    lane.forget(B, tag)
    count = count + 1
  end
end
for _, set in ipairs(all and {':d', ':x', ':l'} or {':d'}) do
  for _, tag in ipairs(count < PART and tags_of(B .. set) or {}) do
    if set == ':l' then lane.release(B, tag, lane.read(B, tag)) end
    call('ZREM', B .. set, tag)
    lane.forget(B, tag)
    count = count + 1
  end
end
if all and count == 0 then call('DEL', B .. ':p', B .. ':s', B .. ':h', B .. ':u') end
return count
