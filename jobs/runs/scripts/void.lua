-- Rows of a cancelled run that were never queued are cancelled. ARGV: name. -> how many
local name = ARGV[1]
if call('HGET', run_key(name), 'state') ~= 'cancelled' then return 0 end
local rows, count = string.gsub(call('GET', run_key(name, 'rows')) or '', '%.', 'c')
if count > 0 then
  call('SET', run_key(name, 'rows'), rows)
  call('HINCRBY', run_key(name), 'cancelled', count)
end
return count
