-- The dead letters, oldest first. ARGV: first, last. Returns {tag, time of death, delivery, body, ...}.
local B, out = KEYS[1], {}
local entries = call('ZRANGE', B .. ':x', ARGV[1], ARGV[2], 'WITHSCORES')
for i = 1, #entries, 2 do
  local m = lane.read(B, entries[i])
  for _, v in ipairs({entries[i], lane.num(entries[i + 1]), m.n, m.body}) do out[#out + 1] = v end
end
return out
