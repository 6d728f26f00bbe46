// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A 32-bit program without a libc: prints the entry LD_PRELOAD of its environment.
static void say(const char *text) {
    int length = 0;
    while (text[length]) length++;
    __asm__ volatile("int $0x80" : "+a"((int){ 4 }) : "b"(1), "c"(text), "d"(length) : "memory");
}

__attribute__((used)) void run(char **stack) {
    const char name[] = "LD_PRELOAD=";
    char **entry = stack + 1;
    while (*entry++) {
    }
    for (; *entry; entry++) {
        unsigned at = 0;
        while (at < sizeof name - 1 && (*entry)[at] == name[at]) at++;
        if (at == sizeof name - 1) {
            say(*entry);
            say("\n");
        }
    }
    __asm__ volatile("int $0x80" : : "a"(1), "b"(0));
    __builtin_unreachable();
}

__asm__(".globl _start\n_start:\n\tmov %esp, %eax\n\tpush %eax\n\tcall run\n");
