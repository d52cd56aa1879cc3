-- Puts the message of an open job again if it is still lost. -> 1 or 0
local id, put, base = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local job = read(id)
if not job or TERMINAL[job.state] or job.put ~= put or lane.find(base, id) then return 0 end
emit(id, job, 'requeued', '{"reason":"message lost"}')
return lane_put(base, unpack(ARGV, 4, 10))
