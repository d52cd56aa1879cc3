-- -> {state, number, ...} of all jobs that are known, or of those of run ARGV[1]
local out = {}
for _, state in ipairs({'queued', 'running', 'succeeded', 'failed', 'cancelled', 'expired'}) do
  out[#out + 1] = state
  out[#out + 1] = ARGV[1] and call('ZINTERCARD', 2, P .. 'run:' .. ARGV[1], index(state))
    or call('ZCARD', index(state))
end
return out
