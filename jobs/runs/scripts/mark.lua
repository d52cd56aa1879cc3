-- Rows that are in the window now. ARGV: name, token, ttl, cursor, then job id and row for each. -> yes | lost
local name, token, ttl, cursor = unpack(ARGV, 1, 4)
if not mine(name, token, ttl) then return 'lost' end
for i = 5, #ARGV, 2 do
  local from = call('GETRANGE', run_key(name, 'rows'), ARGV[i + 1], ARGV[i + 1])
  if from == '.' then
    move(name, ARGV[i + 1], 'q')
    call('HSET', run_key(name, 'open'), ARGV[i], ARGV[i + 1] .. ':0')
  end
end
call('HSET', run_key(name), 'cursor', cursor)
return 'yes'
