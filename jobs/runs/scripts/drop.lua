-- Forgets a run that nobody controls; what it made stays. ARGV: name. -> 1 | 0 held or unknown
local name = ARGV[1]
if call('EXISTS', run_key(name, 'lease')) == 1 then return 0 end
for _, part in ipairs({'rows', 'open', 'picks', 'made', 'kinds', 'wrong', 'pace', 'sizes', 'gates'}) do call('DEL', run_key(name, part)) end
call('ZREM', P .. 'runs', name)
return call('DEL', run_key(name))
