-- A dead letter gets a new life, its deliveries counted anew (ARGV[2] = '1'), or is dropped ('0').
-- ARGV: tag, keep. Returns 1, or 0 when it is not a dead letter.
local B, tag, now = KEYS[1], ARGV[1], lane.now()
if call('ZREM', B .. ':x', tag) == 0 then return 0 end
if ARGV[2] == '0' then
  lane.forget(B, tag)
  return 1
end
local m = lane.read(B, tag)
m.free, m.owner = m.n, ''
lane.write(B, tag, m)
lane.place(B, tag, m, 0, now)
return 1
