// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A program whose second thread sends a message, and whose first ends it, so that the library has made
// nothing for that thread. It has an allocator of its own. `keeper_alone PORT LOCKED`:
// in the process that goes on when the program has ended, the calls of `malloc` and its like, or of
// `getpid`, never return, as if another thread had had a lock of theirs. With `none` a thread sends more
// until the process is gone.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static pid_t own;
static int locks_memory, locks_getpid, fd;
static atomic_int sends;

static void wait_for_ever_if(int locked) {
    while (locked && own != 0 && syscall(SYS_getpid) != own) syscall(SYS_pause);
}

pid_t getpid(void) {
    wait_for_ever_if(locks_getpid);
    return syscall(SYS_getpid);
}

static char memory[64 << 20];
static atomic_size_t used;

static void *take(size_t alignment, size_t size) {
    wait_for_ever_if(locks_memory);
    if (alignment < 16) alignment = 16;
    size_t from = atomic_fetch_add(&used, size + 2 * alignment) + 16;
    size_t at = ((size_t)memory + from + alignment - 1) / alignment * alignment;
    if (at + size > (size_t)memory + sizeof memory) return NULL;
    ((size_t *)at)[-1] = size;
    return (void *)at;
}

void *malloc(size_t size) { return take(16, size); }

void *calloc(size_t number, size_t size) { return take(16, number * size); }

void *memalign(size_t alignment, size_t size) { return take(alignment, size); }

void *aligned_alloc(size_t alignment, size_t size) { return take(alignment, size); }

int posix_memalign(void **at, size_t alignment, size_t size) {
    *at = take(alignment, size);
    return *at ? 0 : ENOMEM;
}

void free(void *at) {
    (void)at;
    wait_for_ever_if(locks_memory);
}

void *realloc(void *old, size_t size) {
    void *new = take(16, size);
    if (new && old) memcpy(new, old, ((size_t *)old)[-1] < size ? ((size_t *)old)[-1] : size);
    return new;
}

static void *send_message(void *port) {
    struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(atoi(port)) };
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (void *)&to, sizeof to) != 0) _exit(3);
    if (send(fd, "the message", 11, 0) != 11) _exit(4);
    return NULL;
}

static void *send_more(void *none) {
    for (;; sends = 1) send(fd, "+", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    return none;
}

int main(int argc, char **argv) {
    pthread_t sender;
    if (argc != 3 || pthread_create(&sender, NULL, send_message, argv[1]) != 0) return 2;
    pthread_join(sender, NULL);
    locks_memory = strcmp(argv[2], "malloc") == 0;
    locks_getpid = strcmp(argv[2], "getpid") == 0;
    own = syscall(SYS_getpid);
    if (strcmp(argv[2], "none") == 0) {
        if (pthread_create(&sender, NULL, send_more, NULL) != 0) return 5;
        while (!sends) usleep(100);
    }
    return 0;
}
