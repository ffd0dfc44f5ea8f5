// decode_walk.cuh - the way of a warp through the work of a decode on tensor cores: line, run, pieces, tiles.
//
// See decode_work.cuh. New tokens are written on the way, when the piece that holds them is entered.
#pragma once
#include "decode_append.cuh"
#include "decode_mma.cuh"

namespace cuattn {

template <typename T, typename C> struct DecodeInputs {
    const T* q;
    C *k_pages, *v_pages;
    const void *block_table, *cache_seqlens, *batch_idx, *leftpad;
    const T *new_k, *new_v;
    const void *cos, *sin;
    Scales k_scales, v_scales;
    const MmaLayout& layout;
};

// The line of all sequences as each thread of a block finds it: how long it is, and where its own sequences begin.
template <int THREADS> struct LineMemory {
    int64 before[THREADS];               // of each thread
    int64 lengths[THREADS / 32];         // of the sequences of a warp
};
struct Line {
    int64 length, before;
    int first, past;                     // the sequences of this thread

    template <typename Cut, int THREADS, typename Read>
    __device__ __forceinline__ static Line of(const Read& sequence, LineMemory<THREADS>& shared, const Work& work,
                                              const DecodeLayout& at) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, batch = int(work.batch), chunk = int(work.chunk);
        Line line{0, 0, int(threadIdx.x) * chunk, min((int(threadIdx.x) + 1) * chunk, batch)};
        if (batch == 1) {
            const Sequence own = sequence(0);
            line.length = Cut(own, at).weight(own);
            return line;
        }
        int64 end = 0;                   // of mine on the line
        for (int b = line.first; b < line.past; ++b) {
            const Sequence own = sequence(b);
            end += Cut(own, at).weight(own);
        }
        line.before = -end;
#pragma unroll
        for (int other = 1; other < 32; other *= 2) {
            const int64 x = __shfl_up_sync(ALL, end, other);
            end += lane >= other ? x : 0;
        }
        if (lane == 31) shared.lengths[warp] = end;
        __syncthreads();
        for (int w = 0; w < int(blockDim.x) / 32; ++w) {
            end += w < warp ? shared.lengths[w] : 0;
            line.length += shared.lengths[w];
        }
        line.before += end;
        shared.before[threadIdx.x] = line.before;
        __syncthreads();
        return line;
    }
};

// A warp on its way through a run of a share: where the next tile is.
template <typename Tile, typename T, typename C, bool PLAIN> struct Walk {
    using Cut = typename Tile::Cut;
    using Pieces = typename Tile::Pieces;
    using Place = typename Tile::Place;

    const DecodeInputs<T, C>& in;
    const Share& my;
    const Run& run;
    const Pieces& pieces;
    int b = 0;                           // the sequence
    int64 origin = 0;                    // of its place on the line
    Sequence own;
    Cut cut;
    const char* table_row;
    Keys keys;                           // that my queries see
    ToMerge pieces_of;                   // the sequence
    int piece, slot = -1;                // which it is, and where its state goes
    int token = 0, stop = 0;             // the next tile, and where the piece ends
    bool more = true;
    Place ahead{-1, 0};                  // where a tile lies, see look_ahead

    static constexpr int AHEAD = 32;     // tiles

    __device__ __forceinline__ Sequence sequence(int b) const {
        return sequence_of<PLAIN>(b, in.cache_seqlens, in.batch_idx, in.leftpad, in.layout.at);
    }

    // At the first piece that begins in the run.
    template <int THREADS>
    __device__ __forceinline__ Walk(const DecodeInputs<T, C>& in, const Share& my, const Run& run, const Pieces& pieces,
                                    const LineMemory<THREADS>& shared)
        : in(in), my(my), run(run), pieces(pieces), own(sequence(0)), cut(own, in.layout.at) {
        const Work& work = in.layout.work;
        if (work.batch > 1) {
            int thread = -1;             // the last one whose sequences do not begin behind that of the run
            for (int n = threadIdx.x % 32; n / 32 < int(blockDim.x) / 32; n += 32) {
                thread += __popc(__ballot_sync(ALL, shared.before[n] <= run.begin));
            }
            b = thread * int(work.chunk), origin = shared.before[thread];
            own = sequence(b), cut = Cut(own, in.layout.at);
            while (origin + cut.weight(own) <= run.begin) {
                origin += cut.weight(own);
                own = sequence(++b), cut = Cut(own, in.layout.at);
            }
        }
        enter_sequence();
        const int64 inside = run.begin - origin + cut.origin();
        piece = max(piece, int((inside + (1 << pieces_of.shift) - 1) >> pieces_of.shift)) - 1;
    }
    __device__ __forceinline__ void enter_sequence() {
        const DecodeLayout& at = in.layout.at;
        pieces_of = pieces.of(cut, own, origin, b, in.layout.work);
        piece = pieces_of.first;
        keys = PLAIN ? Keys{0, own.length} : keys_within(0, own.length, own, my.query, my.query, at);
        table_row = static_cast<const char*>(in.block_table) + own.row * at.table_row * at.table.bytes;
    }
    __device__ __forceinline__ void next_piece() {
        const DecodeLayout& at = in.layout.at;
        ++piece;
        while (piece << pieces_of.shift >= max(own.length, 1)) {
            origin += cut.weight(own);
            more = ++b < int(in.layout.work.batch);
            if (!more) return;
            own = sequence(b), cut = Cut(own, at);
            enter_sequence();
        }
        const int begin = piece << pieces_of.shift, end = min(begin + (1 << pieces_of.shift), own.length);
        more = origin + begin - cut.origin() < run.end;
        if (!more) return;
        slot = int(pieces_of.slot(piece, b));
        if (!PLAIN && at.seqlen_new && max(begin, own.past) < end) {
            append_tokens(b, max(begin, own.past), end, my.g, own, threadIdx.x % 32, 32, in.new_k, in.new_v, in.cos,
                          in.sin, in.k_pages, in.v_pages, in.block_table, in.k_scales, in.v_scales, at);
            __syncwarp();
        }
        token = max(begin, keys.begin) & -TILE, stop = min(end, keys.end);
        if (token >= stop) token = stop = begin;           // one tile all the same, with nothing in it
    }
    // Asks for entries of the table: of AHEAD tiles, a lane each, if PLAIN; else of the tokens of one tile.
    __device__ __forceinline__ void look_ahead() {
        const int lane = threadIdx.x % 32;
        const int mine = PLAIN ? (token & -AHEAD * TILE) + lane * TILE : token + (in.layout.work.aligned ? 0 : lane % TILE);
        ahead = Place::of(min(mine, stop - 1), table_row, in.layout);
    }
    // Of the last tile that next_tile gave; its entry is waited for here.
    __device__ __forceinline__ Place place(int start) const {
        if (!PLAIN) return ahead;
        const int from = start / TILE % AHEAD;
        return {__shfl_sync(ALL, ahead.entry, from), __shfl_sync(ALL, ahead.offset, from)};
    }
    __device__ __forceinline__ Ticket next_tile() {
        const bool enters = token >= stop;
        if (enters) next_piece();
        if (!more) return {0, Ticket::NOTHING, 0, 0};
        const int from = max(keys.begin - token, 0), to = min(stop - token, TILE);
        Ticket next{token, from < to ? (0xffffu >> (TILE - to)) & (0xffffu << from) : 0, slot, b};
        if (from < to && (!PLAIN || enters || token % (AHEAD * TILE) == 0)) look_ahead();
        token += TILE;
        if (token >= stop || (token & ((1 << cut.shift) - 1)) == 0) next.bits |= Ticket::LEAF_ENDS;
        if (token >= stop || (token & ((SPLIT << cut.shift) - 1)) == 0) next.bits |= Ticket::SPLIT_ENDS;
        if (token >= stop) next.bits |= Ticket::PIECE_ENDS;
        return next;
    }
};

}  // namespace cuattn
