-- ARGV: name, value, name, value ... (lane.defaults has the names).
-- Another batch size makes other keys full; the same one, said again by every worker once a minute, costs nothing.
local B = KEYS[1]
local before = lane.setting(B, 'max_batch')
if #ARGV > 0 then call('HSET', B .. ':cfg', unpack(ARGV)) end
if lane.setting(B, 'max_batch') ~= before then
  for _, C in ipairs(call('ZRANGE', B .. ':c', 0, -1)) do
    for _, key in ipairs(call('ZRANGE', B .. ':k:' .. C, 0, -1)) do lane.settle(B, C, key, 0) end
  end
end
return call('HGETALL', B .. ':cfg')
