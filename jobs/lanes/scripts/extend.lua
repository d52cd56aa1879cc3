-- A process's sign of life. ARGV: who, then tag, delivery, tag, delivery ... Returns the tags it has lost.
-- A lease that ran out is taken up again as long as nobody else was given the message.
local B, who, now, lost = KEYS[1], ARGV[1], lane.now(), {}
local till = lane.num(now + lane.setting(B, 'lease'))
call('ZADD', B .. ':p', lane.num(now), who)
for i = 2, #ARGV, 2 do
  local tag = ARGV[i]
  local m = lane.read(B, tag)
  if m and m.n == tonumber(ARGV[i + 1]) and m.owner == who then
    if not call('ZSCORE', B .. ':l', tag) then lane.unrest(B, tag, m) end
    call('ZADD', B .. ':l', till, tag)
    call('SADD', B .. ':o:' .. who, tag)
  else
    lost[#lost + 1] = tag
  end
end
return lost
