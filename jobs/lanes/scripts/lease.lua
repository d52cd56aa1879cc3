-- Leases: a message in a process's hands, and its way back. Follows lib.lua.

-- Process `who` gets the message under a new delivery number. The caller settles the indexes of its key.
function lane.lease(B, tag, m, who, till)
  m.n, m.owner = m.n + 1, who
  lane.write(B, tag, m)
  call('ZADD', B .. ':l', till, tag)
  call('SADD', B .. ':o:' .. who, tag)
end

-- Ends a lease; false when there was none.
function lane.release(B, tag, m)
  call('SREM', B .. ':o:' .. m.owner, tag)
  return call('ZREM', B .. ':l', tag) == 1
end

-- Returns a message to its old place (or aside, until `due`), or to the dead letters when it was delivered
-- too often. Returns 1 (it is back) or 2 (it is dead).
function lane.back(B, tag, m, due, now)
  lane.write(B, tag, m)
  if m.n - m.free >= lane.setting(B, 'max_deliveries') then
    call('ZADD', B .. ':x', lane.num(now), tag)
    return 2
  end
  lane.place(B, tag, m, due, now)
  return 1
end

-- Takes a tag out of wherever it rests without a lease.
function lane.unrest(B, tag, m)
  return lane.remove(B, tag, m) or call('ZREM', B .. ':d', tag) == 1 or call('ZREM', B .. ':x', tag) == 1
end

-- Messages whose time has come join the waiting ones. Returns their number.
function lane.due(B, now)
  local tags = call('ZRANGEBYSCORE', B .. ':d', '-inf', lane.num(now), 'LIMIT', 0, 200)
  for _, tag in ipairs(tags) do
    call('ZREM', B .. ':d', tag)
    local m = lane.read(B, tag)
    if m then lane.place(B, tag, m, 0, now) end
  end
  return #tags
end
