-- ARGV: name, token
if call('GET', run_key(ARGV[1], 'lease')) == ARGV[2] then call('DEL', run_key(ARGV[1], 'lease')) end
return 'yes'
