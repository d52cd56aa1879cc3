-- ARGV: tag, delivery, counted (1 or 0), due (0 = at once, to its old place).
-- Returns 1 back, 2 dead, 0 the message is gone already, -1 another delivery has it.
local B, tag, n, now = KEYS[1], ARGV[1], tonumber(ARGV[2]), lane.now()
local m = lane.read(B, tag)
if not m then return 0 end
if m.n ~= n then return -1 end
if not lane.release(B, tag, m) then return call('ZSCORE', B .. ':x', tag) and 2 or 1 end
m.owner = ''  -- so that a heartbeat already under way does not take it again
if ARGV[3] == '0' then m.free = m.free + 1 end
return lane.back(B, tag, m, tonumber(ARGV[4]), now)
