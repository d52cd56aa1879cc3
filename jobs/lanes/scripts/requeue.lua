-- ARGV: tag, delivery, counted (1 or 0), due (0 = at once, to its old place).
-- Returns 1 back, 2 dead, 0 the message is gone already, -1 another delivery has it.
local B, tag, n, now = KEYS[1], ARGV[1], tonumber(ARGV[2]), lane.now()
local m = lane.read(B, tag)
if not m then return 0 end
if m.n ~= n then return -1 end
local leased = lane.release(B, tag, m)
m.owner = ''  -- neither a heartbeat under way nor a late ack may have it now
if not leased then  -- sent twice, or the lease ran out
  lane.write(B, tag, m)
  return call('ZSCORE', B .. ':x', tag) and 2 or 1
end
if ARGV[3] == '0' then m.free = m.free + 1 end
return lane.back(B, tag, m, tonumber(ARGV[4]), now)
