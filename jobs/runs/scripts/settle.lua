-- What became of rows. ARGV: name, token, ttl, JSON list of {n, id, to, next, draw, kind, message, batch, bytes, picks,
-- refused}.
-- `to` is a letter: an end, `.` (queue it again) or `q` (the next draw, under the id `next`). -> yes | lost
local name, token, ttl = unpack(ARGV, 1, 3)
if not mine(name, token, ttl) then return 'lost' end
local key, open = run_key(name), run_key(name, 'open')
local now = math.floor(lane.now() / 1e7)

local function ended(row)
  call('HINCRBY', run_key(name, 'pace'), now, 1)
  if row.batch then
    call('HINCRBYFLOAT', key, 'batches', 1 / row.batch)
    call('HINCRBY', key, 'batched', 1)
    call('HINCRBY', run_key(name, 'sizes'), row.batch, 1)
  end
  if row.bytes then call('HINCRBY', key, 'bytes', row.bytes) end
  if row.pictures then call('HINCRBY', key, 'pictures', row.pictures) end
  if row.picks then call('HSET', run_key(name, 'picks'), row.n, row.picks) end
  if row.kind then
    call('HINCRBY', run_key(name, 'kinds'), row.kind, 1)
    if call('HLEN', run_key(name, 'wrong')) < MOST_WRONG then
      call('HSET', run_key(name, 'wrong'), row.n, row.kind .. ': ' .. row.message)
    end
  end
end

for _, row in ipairs(cjson.decode(ARGV[4])) do
  local was_open = call('HDEL', open, row.id) == 1
  for _, gate in ipairs(was_open and row.refused or {}) do call('HINCRBY', run_key(name, 'gates'), gate, 1) end
  if was_open and row.to == 'q' then
    call('HSET', open, row.next, row.n .. ':' .. row.draw)
    call('HINCRBY', key, 'redrawn', 1)
    call('HSET', run_key(name, 'picks'), row.n, row.picks or '')
  elseif was_open then
    move(name, row.n, row.to)
    if row.to == '.' then
      if tonumber(call('HGET', key, 'cursor')) > row.n then call('HSET', key, 'cursor', row.n) end
      call('HDEL', run_key(name, 'picks'), row.n)
    else
      ended(row)
    end
  end
end
return 'yes'
