-- -> {jobs in the window, 1 if a controller holds it, field, value, ...}; no fields: unknown
local name = ARGV[1]
local out = {call('HLEN', run_key(name, 'open')), call('EXISTS', run_key(name, 'lease'))}
for _, v in ipairs(call('HGETALL', run_key(name))) do out[#out + 1] = v end
return out
