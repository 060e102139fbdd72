/* Code that makes system calls in every form that is rewritten, and code that only looks so: what is done with each. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "sites.h"

long serve_lower(const long *call);
long serve_upper(const long *call);
long before_clone(const long *call);
long after_clone(const long *call);
void enter_serve_lower(void);
void enter_before_clone(void);
void enter_after_clone(void);

static long seen[7], num_served, num_before, num_after;
long serve_lower(const long *call) {
    memcpy(seen, call, sizeof seen);
    num_served++;
    return 1000 + call[0];
}
long serve_upper(const long *call) { return call[0]; }
long before_clone(const long *call) { return num_before++, call[0]; }
long after_clone(const long *call) { return num_after++, call[0]; }

typedef long Function(long, long, long, long, long, long);
#define CODE(...) (const unsigned char[]){__VA_ARGS__}, sizeof((const unsigned char[]){__VA_ARGS__})

typedef struct {
    const char *name;
    const unsigned char *code;
    size_t num_bytes;
    long result, third; /* what is served: 1000 + number; the third argument that it saw */
    bool is_site;
} Form;

int main(void) {
    static const uint64_t served[MAX_CALLS / 64] = {1ul << 9, [56 / 64] = 1ul << 9 | 1ul << 56, [257 / 64] = 1ul << (257 % 64), [231 / 64] = 1ul << (231 % 64)};
    const Form forms[] = {
        {"at once", CODE(0xb8, 9, 0, 0, 0, 0x0f, 0x05, 0xc3), 1009, 3, true},
        {"with moves in between", CODE(0xb8, 9, 0, 0, 0, 0xba, 7, 0, 0, 0, 0x48, 0x89, 0xfe, 0x0f, 0x05, 0xc3), 1009, 7, true},
        {"with a place by its distance", CODE(0xb8, 9, 0, 0, 0, 0x8b, 0x15, 3, 0, 0, 0, 0x0f, 0x05, 0xc3, 0x2a, 0, 0, 0), 1009, 42, true},
        {"by the function for any", CODE(0x48, 0x89, 0xf8, 0x48, 0x89, 0xf7, 0x48, 0x89, 0xd6, 0x48, 0x89, 0xca, 0x0f, 0x05, 0xc3), 1039, 4, true},
        {"from a register, then compared", CODE(0xbe, 231, 0, 0, 0, 0x89, 0xf0, 0x0f, 0x05, 0x48, 0x3d, 0, 0xf0, 0xff, 0xff, 0x0f, 0x97, 0xc2, 0xc3), 1231, 3, true},
        {"another number", CODE(0xb8, 39, 0, 0, 0, 0x0f, 0x05, 0xc3), -1, 0, false},
        {"into another register", CODE(0xb8, 39, 0, 0, 0, 0x41, 0xb8, 9, 0, 0, 0, 0x0f, 0x05, 0xc3), -1, 0, false},
        {"a number that is set again", CODE(0xb8, 9, 0, 0, 0, 0xb8, 39, 0, 0, 0, 0x0f, 0x05, 0xc3), -1, 0, false},
        {"a number that is moved over", CODE(0xb8, 9, 0, 0, 0, 0xba, 39, 0, 0, 0, 0x89, 0xd0, 0x0f, 0x05, 0xc3), -1, 0, false},
        {"a jump in between", CODE(0xb8, 9, 0, 0, 0, 0xeb, 0, 0xb8, 39, 0, 0, 0, 0x0f, 0x05, 0xc3), -1, 0, false},
        {"a place that looks like a number", CODE(0x0f, 0x1f, 0xb8, 1, 1, 0, 0, 0xb8, 39, 0, 0, 0, 0x0f, 0x05, 0xc3), -1, 0, false}};
    unsigned char *memory = mmap(NULL, 1 << 16, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    void (**ways)(void) = (void (**)(void))(void *)memory;
    ways[0] = enter_serve_lower, ways[1] = enter_before_clone, ways[2] = enter_after_clone;
    unsigned char *next = memory + 4096;
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        const Form *form = &forms[i];
        for (int is_alone = 0; is_alone < 2; is_alone++) {
            unsigned char *code = (unsigned char *)(((uintptr_t)next + 63) & ~63ul);
            Stubs stubs = {code + 256, code + 1024, &ways[0], &ways[1], &ways[2], served};
            next = code + 1024;
            memcpy(code, form->code, form->num_bytes);
            if (has_sites(&stubs, code, form->num_bytes) != form->is_site) return printf("%s: found wrongly\n", form->name), 1;
            int num_sites;
            bool is_done = rewrite_sites_alive(&stubs, code, form->num_bytes, is_alone, &num_sites);
            if (!is_done && is_alone) return printf("%s: not done\n", form->name), 1;
            if (!is_done) continue; /* of the third kind */
            if (num_sites != form->is_site) return printf("%s: %d sites\n", form->name, num_sites), 1;
            if (!form->is_site && memcmp(code, form->code, form->num_bytes)) return printf("%s: changed\n", form->name), 1;
            num_served = 0;
            long result = ((Function *)(uintptr_t)code)(form->code[0] == 0x48 ? 39 : 1, 2, 3, 4, 5, 6);
            if (num_served != form->is_site || (form->is_site && (result != form->result || seen[3] != form->third)))
                return printf("%s: %ld, served %ld times, saw %ld\n", form->name, result, num_served, seen[3]), 1;
        }
    }
    printf("%zu forms\n", sizeof forms / sizeof *forms);
    return 0;
}
