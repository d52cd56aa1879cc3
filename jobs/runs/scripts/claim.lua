-- Takes or keeps the controller's lease, and counts the time under it. ARGV: name, token, ttl (ms), 1 to take it from
-- whoever has it. -> taken | kept | held | unknown
local name, token, ttl, force = unpack(ARGV)
local key, lease = run_key(name), run_key(name, 'lease')
local state = call('HGET', key, 'state')
if not state then return 'unknown' end
local holder = call('GET', lease)
if holder and holder ~= token and force ~= '1' then return 'held' end
call('SET', lease, token, 'PX', ttl)
local now, last = lane.now(), call('HGET', key, 'renewed')
if holder == token and last and state == 'running' then
  call('HINCRBY', key, 'spent', lane.num(math.max(0, now - tonumber(last))))
end
call('HSET', key, 'renewed', lane.num(now))
if state == 'planned' then call('HSET', key, 'state', 'running') end
return holder == token and 'kept' or 'taken'
