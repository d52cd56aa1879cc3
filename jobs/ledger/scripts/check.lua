-- For each pair (id, attempt): go | cancel | deadline | fenced.
local out = {}
for i = 1, #ARGV, 2 do
  local job = read(ARGV[i])
  local current = job and job.state == 'running' and job.attempt == tonumber(ARGV[i + 1])
  out[#out + 1] = current and (job.stop or 'go') or 'fenced'
end
return out
