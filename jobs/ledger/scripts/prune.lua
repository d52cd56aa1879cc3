-- Forgets at most ARGV[1] old records of each terminal state. -> how many
local n = 0
for state in pairs(TERMINAL) do n = n + prune(state, lane.now(), tonumber(ARGV[1])) end
return n
