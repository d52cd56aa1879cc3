-- What became of rows. ARGV: name, token, ttl, JSON list of {n, id, to, next, draw, kind, message, batch, bytes, picks,
-- refused, keep}.
-- `to` is a letter: an end, `.` (queue it again) or `q` (the next draw, under the id `next`). -> yes | lost
local name, token, ttl = unpack(ARGV, 1, 3)
if not mine(name, token, ttl) then return 'lost' end
local key, open = run_key(name), run_key(name, 'open')
local slot = math.floor(lane.now() / 1e7)

local function wrong(row)
  call('HINCRBY', run_key(name, 'kinds'), row.kind, 1)
  if call('HLEN', run_key(name, 'wrong')) < MOST_WRONG then
    call('HSET', run_key(name, 'wrong'), row.n, row.kind .. ': ' .. row.message)
  end
end

-- What this draw adds to what the row's draws before it did.
local function added(row, before)
  local adds = {bytes = row.bytes, gates = {}}
  for _, gate in ipairs(row.refused or {}) do adds.gates[gate] = (adds.gates[gate] or 0) + 1 end
  if row.to == 'q' then
    adds.redrawn = 1
  else
    adds.slot, adds.batch, adds.pictures = slot, row.batch, row.pictures
    if row.to ~= 'd' then adds.bytes = -(before.bytes or 0) end -- what was accepted of it does not count
  end
  return adds
end

for _, row in ipairs(cjson.decode(ARGV[4])) do
  if call('HDEL', open, row.id) == 1 then
    if row.to == '.' then
      move(name, row.n, row.to)
      take_back(name, row.n)
      if tonumber(call('HGET', key, 'cursor')) > row.n then call('HSET', key, 'cursor', row.n) end
      call('HDEL', run_key(name, 'picks'), row.n)
    else
      local before = made(name, row.n)
      local adds = added(row, before)
      sum(name, adds, 1)
      remember(name, row.n, before, adds, row.to ~= 'd' or row.keep)
      if row.to == 'q' then
        call('HSET', open, row.next, row.n .. ':' .. row.draw)
        call('HSET', run_key(name, 'picks'), row.n, row.picks or '')
      else
        move(name, row.n, row.to)
        if row.picks then call('HSET', run_key(name, 'picks'), row.n, row.picks) end
        if row.kind then wrong(row) end
      end
    end
  end
end
return 'yes'
