-- Rows of these ends wait to be queued again, and the run goes on. ARGV: name, letters. -> how many | -1 unknown
local name, letters = unpack(ARGV)
local key = run_key(name)
if call('EXISTS', key) == 0 then return -1 end
local before = call('GET', run_key(name, 'rows')) or ''
local rows, count = before, 0
for letter in string.gmatch(letters, '.') do
  local changed, n = string.gsub(rows, letter, '.')
  rows, count = changed, count + n
  call('HSET', key, ENDS[letter], 0)
end
local function goes(row) -- whether it had one of these ends
  local letter = string.sub(before, row + 1, row + 1)
  return letter ~= '' and string.find(letters, letter, 1, true)
end
for _, row in ipairs(call('HKEYS', run_key(name, 'made'))) do
  if goes(row) then take_back(name, row) end
end
for _, row in ipairs(call('HKEYS', run_key(name, 'wrong'))) do
  if goes(row) then call('HDEL', run_key(name, 'wrong'), row) end
end
local rejected = call('HGET', run_key(name, 'kinds'), 'rejected')
if string.find(letters, 'f') then
  call('DEL', run_key(name, 'kinds'))
  if rejected then call('HSET', run_key(name, 'kinds'), 'rejected', rejected) end
end
if string.find(letters, 'r') then call('HDEL', run_key(name, 'kinds'), 'rejected') end
call('SET', run_key(name, 'rows'), rows)
call('HSET', key, 'cursor', 0)
if count > 0 then
  call('HSET', key, 'state', 'running')
  call('HDEL', key, 'why', 'ended', 'closed')
end
return count
