-- A page of the ids in the first index that are in all others too, after (score, id) in its order.
-- Looks at no more than `most` ids, so that a page has a bounded cost and may be short.
-- ARGV: newest first (1 or 0), score, id, limit, most, index, other indexes
-- -> {score, id of the last one looked at, or '' at the end; then {id, fields...} each}
local newest, limit, most, key = ARGV[1] == '1', tonumber(ARGV[4]), tonumber(ARGV[5]), P .. ARGV[6]
local rank, looked, gone = rank_after(key, newest, ARGV[2], ARGV[3]), 0, {}
local out = {'', ''}

local function wanted(id)
  for i = 7, #ARGV do
    if not call('ZSCORE', P .. ARGV[i], id) then return false end
  end
  return true
end

local ended = false
while not ended and looked < most and #out - 2 < limit do
  local part = call(newest and 'ZREVRANGE' or 'ZRANGE', key, rank + looked, rank + looked + 99, 'WITHSCORES')
  ended = #part < 200
  for i = 1, #part, 2 do
    if #out - 2 == limit or looked == most then ended = false break end
    local id = part[i]
    looked, out[1], out[2] = looked + 1, lane.num(tonumber(part[i + 1])), id
    if wanted(id) then
      local record = whole(id)
      if #record > 0 then
        out[#out + 1] = {id, record}
      else
        gone[#gone + 1] = id -- the record outlived its time: so has this entry
      end
    end
  end
end
if ended then out[1], out[2] = '', '' end
for _, id in ipairs(gone) do call('ZREM', key, id) end
return out
