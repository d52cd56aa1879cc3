-- Rows that are done are in a shard now; or, with '.', their result is gone. ARGV: name, token, ttl, letter, rows ...
-- -> the rows of these that were done and in no shard | lost
local name, token, ttl, to = unpack(ARGV, 1, 4)
if not mine(name, token, ttl) then return 'lost' end
local moved = {}
for i = 5, #ARGV do
  local from = call('GETRANGE', run_key(name, 'rows'), ARGV[i], ARGV[i])
  if from == 'd' then
    move(name, ARGV[i], to)
    if to == '.' then
      take_back(name, ARGV[i])
      call('HSET', run_key(name), 'cursor', 0)
    else
      call('HDEL', run_key(name, 'made'), ARGV[i])
    end
    moved[#moved + 1] = ARGV[i]
  end
end
return moved
