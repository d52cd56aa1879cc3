-- ARGV: tag, delivery. Returns 1 done, 0 the message is gone already, -1 refused.
-- A lease that ran out may still be acknowledged as long as nobody else was given the message; one that was
-- given back (it has no owner) may not: its task ends without having done the work.
local B, tag, n = KEYS[1], ARGV[1], tonumber(ARGV[2])
local m = lane.read(B, tag)
if not m then return 0 end
if m.n ~= n or m.owner == '' then return -1 end
if not lane.release(B, tag, m) then lane.unrest(B, tag, m) end
lane.forget(B, tag)
return 1
