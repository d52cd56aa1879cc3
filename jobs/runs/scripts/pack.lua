-- Rows that are done and in a shard now; or, to '.', rows whose result is gone. ARGV: name, token, ttl, letter, rows ...
-- -> yes | lost
local name, token, ttl, to = unpack(ARGV, 1, 4)
if not mine(name, token, ttl) then return 'lost' end
for i = 5, #ARGV do
  local from = call('GETRANGE', run_key(name, 'rows'), ARGV[i], ARGV[i])
  if from == 'd' then
    move(name, ARGV[i], to)
    if to == '.' then call('HSET', run_key(name), 'cursor', 0) end
  end
end
return 'yes'
