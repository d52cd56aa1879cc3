-- Rows of these ends wait to be queued again, and the run goes on. ARGV: name, letters. -> how many | -1 unknown
local name, letters = unpack(ARGV)
local key = run_key(name)
if call('EXISTS', key) == 0 then return -1 end
local rows, count = call('GET', run_key(name, 'rows')) or '', 0
for letter in string.gmatch(letters, '.') do
  local changed, n = string.gsub(rows, letter, '.')
  rows, count = changed, count + n
  call('HSET', key, ENDS[letter], 0)
end
call('SET', run_key(name, 'rows'), rows)
call('HSET', key, 'cursor', 0)
if count > 0 then
  call('HSET', key, 'state', 'running')
  call('HDEL', key, 'why', 'ended')
end
call('DEL', run_key(name, 'kinds'), run_key(name, 'wrong'))
return count
