/* Places in machine code of x86-64 that make system calls, and their rewriting.
 *
 * A site is an instruction `syscall` with what sets its number some instructions before:
 *
 *     mov $9,%eax  ...  syscall                 one call, as all of a C library does
 *     mov %rdi,%rax ... syscall                 any call: the function syscall() itself; %rsi in newer C libraries
 *     mov $231,%esi  ..  mov %esi,%eax          the number comes from elsewhere, and what the call gives is compared:
 *                        syscall                _exit()
 *                        cmp $-4096,%rax
 *
 * Where the number is one that is served, the first five bytes (of the third kind: from the second `mov` on) become a
 * jump to a stub, which has the instructions of the site again, calls what serves the call, and goes on behind the site.
 * The other bytes stay, so code that jumps into the middle of one of the first kind does what it did before, unserved.
 * Instructions in between are told apart by a small table; a site with one that it lacks is left as it is. A byte
 * sequence that only looks like a site cannot pass: everything up to the `syscall` must be instructions, of which none
 * jumps or sets the number again.
 *
 * None of this may use memory of a C library or a register that a system call leaves alone: it runs inside of one.
 */
#pragma GCC target("general-regs-only")
#include "sites.h"

enum { FARTHEST = 64, JUMP_BYTES = 5, MAX_STUB = FARTHEST + 96 };

/* One instruction: its bytes, 0 if it is none that we know. */
typedef struct {
    int num_bytes;
    int relative_at; /* where its 4 bytes are that count from the next instruction; 0: it has none */
    bool sets_rax;
} Instruction;

/* Operands of an opcode, as bits: a byte ModRM follows; its register is set, or what it points to; bytes of immediates. */
enum { NO = 0, MODRM = 1, SETS_REG = 2, SETS_RM = 4, IMM8 = 8, IMM32 = 16, IN_OPCODE = 32, KNOWN = 64 };

static int operands_of(unsigned char opcode, bool is_long) {
    if (is_long) {
        switch (opcode) {
        case 0x10: case 0x11: case 0x16: case 0x17: case 0x28: case 0x29: case 0x6c: case 0x6f: case 0x7f: case 0xd6:
        case 0xef: case 0x57: return KNOWN | MODRM; /* moves of vectors */
        case 0xb6: case 0xb7: case 0xbe: case 0xbf: return KNOWN | MODRM | SETS_REG;
        case 0x6e: case 0x7e: return KNOWN | MODRM | SETS_RM;
        default: return NO;
        }
    }
    if (opcode >= 0xb8 && opcode <= 0xbf) return KNOWN | IN_OPCODE | IMM32;
    switch (opcode) {
    case 0x01: case 0x09: case 0x21: case 0x29: case 0x31: case 0x88: case 0x89: return KNOWN | MODRM | SETS_RM;
    case 0x03: case 0x0b: case 0x23: case 0x2b: case 0x33: case 0x63: case 0x8a: case 0x8b: case 0x8d:
        return KNOWN | MODRM | SETS_REG;
    case 0x38: case 0x39: case 0x3a: case 0x3b: case 0x84: case 0x85: return KNOWN | MODRM;
    case 0x80: case 0x83: case 0xc1: case 0xc6: return KNOWN | MODRM | SETS_RM | IMM8;
    case 0x81: case 0xc7: return KNOWN | MODRM | SETS_RM | IMM32;
    default: return NO;
    }
}

static Instruction look_at(const unsigned char *code, const unsigned char *end) {
    const Instruction unknown = {0, 0, false};
    const unsigned char *at = code;
    unsigned char rex = 0;
    /* An operand of 16 bits would shorten immediates, so its prefix is known before opcodes of two bytes alone. */
    bool has_prefix = false;
    while (at < end && (*at == 0x66 || *at == 0xf3 || *at == 0xf2)) has_prefix = true, at++;
    if (at < end && (*at & 0xf0) == 0x40) rex = *at++;
    bool is_long = at < end && *at == 0x0f;
    if (is_long) at++;
    if (at >= end || (has_prefix && !is_long)) return unknown;
    unsigned char opcode = *at++;
    int operands = operands_of(opcode, is_long);
    Instruction found = {0, 0, false};
    if (!(operands & KNOWN)) return unknown;
    if (operands & IN_OPCODE) {
        if (rex & 8) return unknown; /* an immediate of 8 bytes */
        found.sets_rax = opcode == 0xb8 && !(rex & 1);
    }
    if (operands & MODRM) {
        if (at >= end) return unknown;
        unsigned char modrm = *at++, mod = modrm >> 6, rm = modrm & 7, reg = modrm >> 3 & 7;
        found.sets_rax = (operands & SETS_REG && reg == 0 && !(rex & 4)) ||
                         (operands & SETS_RM && mod == 3 && rm == 0 && !(rex & 1));
        bool has_base = true;
        if (mod != 3 && rm == 4) {
            if (at >= end) return unknown;
            has_base = (*at++ & 7) != 5;
        }
        if (mod == 0 && rm == 5) found.relative_at = (int)(at - code);
        if (mod == 1) at += 1;
        if (mod == 2 || (mod == 0 && (rm == 5 || !has_base))) at += 4;
    }
    if (operands & IMM8) at += 1;
    if (operands & IMM32) at += 4;
    if (at > end) return unknown;
    found.num_bytes = (int)(at - code);
    return found;
}

/* Whether instructions that set rax no more lead from one place exactly to another. */
static bool leads_to(const unsigned char *from, const unsigned char *to) {
    while (from < to) {
        Instruction one = look_at(from, to);
        if (one.num_bytes == 0 || one.sets_rax) return false;
        from += one.num_bytes;
    }
    return from == to;
}

static uint32_t word_at(const unsigned char *at) {
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static bool is_served(const Stubs *stubs, uint32_t number) {
    return number < MAX_CALLS && stubs->served[number / 64] >> number % 64 & 1;
}

typedef struct {
    unsigned char *from, *call, *end; /* `call`: the instruction syscall; NULL: there is no site */
    int number;                       /* -1: any */
} Site;

/* Whether a register was given the number of a served call shortly before. */
static bool holds_served(const Stubs *stubs, const unsigned char *code, const unsigned char *before, int reg) {
    for (const unsigned char *at = before - JUMP_BYTES; at >= code && before - at <= FARTHEST / 2; at--)
        if (at[0] == 0xb8 + reg && is_served(stubs, word_at(at + 1)) && (at == code || (at[-1] & 0xf0) != 0x40))
            return true;
    return false;
}

/* The site whose `syscall` is at `code + at`. */
static Site site_of(const Stubs *stubs, unsigned char *code, size_t num_bytes, size_t at) {
    unsigned char *call = code + at;
    for (size_t back = JUMP_BYTES; back <= FARTHEST && back <= at; back++) {
        unsigned char *from = call - back;
        bool is_other_register = back < at && (from[-1] & 0xf0) == 0x40;
        if (from[0] == 0xb8 && !is_other_register && is_served(stubs, word_at(from + 1)) && leads_to(from + JUMP_BYTES, call))
            return (Site){from, call, call + 2, (int)word_at(from + 1)};
        /* mov %rdi,%rax or %rsi; all of the jump is in this and the next instruction. */
        if (back >= 6 && from[0] == 0x48 && from[1] == 0x89 && (from[2] == 0xf8 || from[2] == 0xf0) &&
            look_at(from + 3, call).num_bytes >= 2 && leads_to(from + 3, call))
            return (Site){from, call, call + 2, -1};
    }
    const unsigned char *move = call - 2;
    bool is_compared = at + 8 <= num_bytes && call[2] == 0x48 && call[3] == 0x3d;
    bool is_moved = at >= 2 && move[0] == 0x89 && (move[1] & 0xc7) == 0xc0;
    if (is_moved && is_compared && holds_served(stubs, code, move, move[1] >> 3 & 7))
        return (Site){call - 2, call, call + 8, -1};
    return (Site){NULL, NULL, NULL, 0};
}

typedef struct {
    unsigned char *to;
} Writer;
static void put(Writer *writer, const unsigned char *bytes, size_t count) {
    for (size_t i = 0; i < count; i++) *writer->to++ = bytes[i];
}
#define PUT(writer, ...) put(writer, (const unsigned char[]){__VA_ARGS__}, sizeof((unsigned char[]){__VA_ARGS__}))
/* Four bytes that lead from behind them to a place. */
static void put_way(Writer *writer, const void *there) {
    uint32_t way = (uint32_t)((uintptr_t)there - (uintptr_t)(writer->to + 4));
    PUT(writer, (unsigned char)way, (unsigned char)(way >> 8), (unsigned char)(way >> 16), (unsigned char)(way >> 24));
}

/* The instructions of a site, where those that name a place by its distance name the same place. */
static void put_again(Writer *writer, const unsigned char *from, const unsigned char *to) {
    while (from < to) {
        Instruction one = look_at(from, to);
        unsigned char *copy = writer->to;
        put(writer, from, (size_t)one.num_bytes);
        if (one.relative_at) {
            uint32_t way = word_at(from + one.relative_at) + (uint32_t)((uintptr_t)from - (uintptr_t)copy);
            for (int i = 0; i < 4; i++) copy[one.relative_at + i] = (unsigned char)(way >> 8 * i);
        }
        from += one.num_bytes;
    }
}

enum { CLONE = 56, CLONE3 = 435 };

static void put_call(Writer *writer, const void *way) {
    PUT(writer, 0x48, 0x8d, 0x64, 0x24, 0x80); /* lea -128(%rsp),%rsp: below the red zone */
    PUT(writer, 0xff, 0x15);                   /* call *way(%rip) */
    put_way(writer, way);
    PUT(writer, 0x48, 0x8d, 0xa4, 0x24, 0x80, 0, 0, 0); /* lea 128(%rsp),%rsp */
}

static unsigned char *make_stub(Stubs *stubs, const Site *site) {
    Writer writer = {stubs->next};
    put_again(&writer, site->from, site->call);
    if (site->number == CLONE || site->number == CLONE3) {
        int number = site->number;
        /* The child comes out with a stack of its own, so it must not have to come back on ours. */
        put_call(&writer, stubs->before);
        PUT(&writer, 0xb8, (unsigned char)number, (unsigned char)(number >> 8), 0, 0); /* mov $number,%eax */
        PUT(&writer, 0x0f, 0x05);                                                      /* syscall */
        put_call(&writer, stubs->after);
    } else {
        put_call(&writer, stubs->serve);
    }
    put(&writer, site->call + 2, (size_t)(site->end - site->call - 2));
    PUT(&writer, 0xe9); /* jmp */
    put_way(&writer, site->end);
    unsigned char *stub = stubs->next;
    stubs->next = (unsigned char *)(((uintptr_t)writer.to + 15) & ~(uintptr_t)15);
    return stub;
}

static unsigned char jump_byte(const unsigned char *site, const unsigned char *stub, int i) {
    uint32_t way = (uint32_t)(uintptr_t)(stub - (site + JUMP_BYTES));
    return i == 0 ? 0xe9 : (unsigned char)(way >> 8 * (i - 1));
}

/* The next `syscall` at or behind `at`; `num_bytes` if there is none. */
static size_t next_call(const unsigned char *code, size_t num_bytes, size_t at) {
    for (; at + 2 <= num_bytes; at++)
        if (code[at] == 0x0f && code[at + 1] == 0x05) return at;
    return num_bytes;
}

bool has_sites(const Stubs *stubs, const unsigned char *code, size_t num_bytes) {
    for (size_t at = next_call(code, num_bytes, 0); at < num_bytes; at = next_call(code, num_bytes, at + 2))
        if (site_of(stubs, (unsigned char *)(uintptr_t)code, num_bytes, at).call) return true;
    return false;
}

int rewrite_sites(Stubs *stubs, unsigned char *code, size_t num_bytes) {
    int num_sites = 0;
    return rewrite_sites_alive(stubs, code, num_bytes, true, &num_sites) ? num_sites : -1;
}

bool rewrite_sites_alive(Stubs *stubs, unsigned char *code, size_t num_bytes, bool is_alone, int *num_sites) {
    *num_sites = 0;
    for (size_t at = next_call(code, num_bytes, 0); at < num_bytes; at = next_call(code, num_bytes, at + 2)) {
        Site found = site_of(stubs, code, num_bytes, at);
        if (found.call == NULL) continue;
        /* Of the third kind the jump covers the call itself. */
        if (stubs->end - stubs->next < MAX_STUB || (!is_alone && found.end != found.call + 2)) return false;
        unsigned char *site = found.from, *stub = make_stub(stubs, &found);
        ++*num_sites;
        if (is_alone) {
            for (int i = 0; i < JUMP_BYTES; i++) site[i] = jump_byte(site, stub, i);
            continue;
        }
        /* Others may run it: eight bytes inside one line of the cache are seen as they were or as they are. */
        uintptr_t before = (uintptr_t)site % 64 > 56 ? (uintptr_t)site % 64 - 56 : 0;
        if (before + JUMP_BYTES > 8) return false;
        unsigned char *from = site - before;
        uint64_t bytes = (uint64_t)word_at(from) | (uint64_t)word_at(from + 4) << 32;
        for (int i = 0; i < JUMP_BYTES; i++) {
            unsigned shift = 8 * ((unsigned)before + (unsigned)i);
            bytes = (bytes & ~((uint64_t)0xff << shift)) | (uint64_t)jump_byte(site, stub, i) << shift;
        }
        __asm__ volatile("movq %1,%0" : "=m"(*(uint64_t *)(void *)from) : "r"(bytes) : "memory");
    }
    return true;
}
