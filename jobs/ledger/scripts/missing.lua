-- A page of open jobs of one state, by time of submit, and what is wrong with their messages.
-- ARGV: state, score, id, how many -> {score, id, or '' at the end; then {id, lost | dead, put, spec, extras}}
local key = index(ARGV[1])
local rank = rank_after(key, false, ARGV[2], ARGV[3])
local page = call('ZRANGE', key, rank, rank + tonumber(ARGV[4]) - 1, 'WITHSCORES')
local out = {'', ''}
if #page == 2 * tonumber(ARGV[4]) then
  out = {lane.num(tonumber(page[#page])), page[#page - 1]}
end
for i = 1, #page, 2 do
  local id = page[i]
  local base = P .. (call('HGET', job_key(id), 'lane') or '')
  local tag = lane.find(base, id)
  local what = not tag and 'lost' or (call('ZSCORE', base .. ':x', tag) and 'dead')
  if what then
    local v = call('HMGET', job_key(id), 'put', 'extras')
    out[#out + 1] = {id, what, tonumber(v[1] or 1), call('GET', spec_key(id)), v[2] or ''}
  end
end
return out
