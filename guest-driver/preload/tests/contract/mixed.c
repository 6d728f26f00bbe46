// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A server or a client that makes some calls by libc and the others by an instruction of its own.
// `mixed server|client block|poll|epoll CALLS PORT`: bit n of the number CALLS says so of call n below.
// Both ends say what they have read. -DNO_OWN_CALLS: without such an instruction; -DLIKE_RUST: with text
// that programs in Rust have.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CHECK(is) do { if (!(is)) { printf("%s, line %d: %s\n", #is, __LINE__, strerror(errno)); exit(1); } } while (0)

enum { SOCKET, BIND, LISTEN, ACCEPT, CONNECT, CREATE, CONTROL, WAIT, POLL, READ, RECV, WRITE, SEND, CLOSE };

#ifdef LIKE_RUST
const char place[] = "/rustc/0/library/std/src/io/mod.rs";
#endif

#ifdef NO_OWN_CALLS
enum { own };
#define raw(...) -1
#else
static unsigned long own;

static __attribute__((noinline)) long raw(long number, long a, long b, long c, long d, long e, long f) {
    long result;
#if defined(__x86_64__)
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
#else
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c,
                  x3 __asm__("x3") = d, x4 __asm__("x4") = e, x5 __asm__("x5") = f;
    __asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    result = x0;
#endif
    if (result < 0 && result > -4096) {
        errno = -result;
        return -1;
    }
    return result;
}
#endif

#define IS_OWN(call) (own >> (call) & 1)
#define P(pointer) ((long)(pointer))

static int do_socket(void) {
    int kind = SOCK_STREAM | SOCK_CLOEXEC;
    return IS_OWN(SOCKET) ? raw(SYS_socket, AF_INET, kind, 0, 0, 0, 0) : socket(AF_INET, kind, 0);
}
static int do_bind(int fd, struct sockaddr_in *to) {
    return IS_OWN(BIND) ? raw(SYS_bind, fd, P(to), sizeof *to, 0, 0, 0) : bind(fd, (void *)to, sizeof *to);
}
static int do_listen(int fd) {
    return IS_OWN(LISTEN) ? raw(SYS_listen, fd, 64, 0, 0, 0, 0) : listen(fd, 64);
}
static int do_accept(int fd, int flags) {
    return IS_OWN(ACCEPT) ? raw(SYS_accept4, fd, 0, 0, flags, 0, 0) : accept4(fd, NULL, NULL, flags);
}
static int do_connect(int fd, struct sockaddr_in *to) {
    return IS_OWN(CONNECT) ? raw(SYS_connect, fd, P(to), sizeof *to, 0, 0, 0) : connect(fd, (void *)to, sizeof *to);
}
static int do_create(void) {
    return IS_OWN(CREATE) ? raw(SYS_epoll_create1, EPOLL_CLOEXEC, 0, 0, 0, 0, 0) : epoll_create1(EPOLL_CLOEXEC);
}
static int do_control(int set, int op, int fd, struct epoll_event *event) {
    return IS_OWN(CONTROL) ? raw(SYS_epoll_ctl, set, op, fd, P(event), 0, 0) : epoll_ctl(set, op, fd, event);
}
static int do_wait(int set, struct epoll_event *events, int n) {
    return IS_OWN(WAIT) ? raw(SYS_epoll_pwait, set, P(events), n, -1, 0, 8) : epoll_wait(set, events, n, -1);
}
static int do_poll(struct pollfd *list) {
    return IS_OWN(POLL) ? raw(SYS_ppoll, P(list), 1, 0, 0, 8, 0) : poll(list, 1, -1);
}
static long do_read(int turn, int fd, void *to, size_t n) {
    if (turn % 2)
        return IS_OWN(READ) ? raw(SYS_read, fd, P(to), n, 0, 0, 0) : read(fd, to, n);
    return IS_OWN(RECV) ? raw(SYS_recvfrom, fd, P(to), n, 0, 0, 0) : recv(fd, to, n, 0);
}
static long do_write(int turn, int fd, const void *from, size_t n) {
    if (turn % 2)
        return IS_OWN(WRITE) ? raw(SYS_write, fd, P(from), n, 0, 0, 0) : write(fd, from, n);
    return IS_OWN(SEND) ? raw(SYS_sendto, fd, P(from), n, MSG_NOSIGNAL, 0, 0) : send(fd, from, n, MSG_NOSIGNAL);
}
static int do_close(int fd) {
    return IS_OWN(CLOSE) ? raw(SYS_close, fd, 0, 0, 0, 0, 0) : close(fd);
}

static char how;
// Two numbers of one set, of which event loops keep one for other threads.
static int set = -1, other_number;

// Waits until a descriptor shows one of these events. The set's data are an address, as programs have it.
static int places[64], used;
static void watch(int fd, unsigned events) {
    if (how != 'e')
        return;
    if (set < 0) {
        CHECK((set = do_create()) >= 0);
        CHECK((other_number = fcntl(set, F_DUPFD_CLOEXEC, 0)) >= 0);
    }
    CHECK(used < 64);
    places[used] = fd;
    struct epoll_event event = { .events = events, .data.ptr = places + used++ };
    CHECK(do_control(other_number, EPOLL_CTL_ADD, fd, &event) == 0);
}
static void await(int fd, unsigned events) {
    if (how == 'p') {
        struct pollfd one = { .fd = fd, .events = events };
        CHECK(do_poll(&one) == 1);
    }
    for (int n = 0; how == 'e' && !n;) {
        struct epoll_event found[8];
        int all = do_wait(set, found, 8);
        CHECK(all >= 0);
        for (int i = 0; i < all; i++) {
            int *place = found[i].data.ptr;
            CHECK((place >= places && place < places + used) || !"data that the program has not given");
            n |= *place == fd;
        }
    }
}

static size_t said(int fd, int turn, char *to, size_t room) {
    for (;;) {
        long n = do_read(turn, fd, to, room);
        if (n >= 0)
            return n;
        CHECK(errno == EAGAIN);
        await(fd, POLLIN);
    }
}
static void say(int fd, int turn, const char *from, size_t n) {
    while (n) {
        long done = do_write(turn, fd, from, n);
        CHECK(done > 0 || errno == EAGAIN);
        if (done < 0)
            await(fd, POLLOUT);
        else
            from += done, n -= done;
    }
}

#define CLIENTS 3
#define LINES 4

int main(int argc, char **argv) {
    CHECK(argc == 5);
    int is_server = *argv[1] == 's', flags = *argv[2] == 'b' ? 0 : SOCK_NONBLOCK;
    how = *argv[2];
#ifndef NO_OWN_CALLS
    own = strtoul(argv[3], NULL, 0);
#endif
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(atoi(argv[4])) };
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int listener = -1, on = 1;
    if (is_server) {
        CHECK((listener = do_socket()) >= 0);
        CHECK(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
        CHECK(do_bind(listener, &address) == 0 && do_listen(listener) == 0);
        if (flags)
            CHECK(fcntl(listener, F_SETFL, O_NONBLOCK) == 0);
        watch(listener, EPOLLIN);
    }
    for (int client = 0; client < CLIENTS; client++) {
        int fd;
        if (is_server) {
            while ((fd = do_accept(listener, flags)) < 0) {
                CHECK(errno == EAGAIN);
                await(listener, POLLIN);
            }
            watch(fd, EPOLLIN | EPOLLRDHUP);
        } else {
            CHECK((fd = do_socket()) >= 0);
            if (flags)
                CHECK(fcntl(fd, F_SETFL, O_NONBLOCK) == 0);
            CHECK(do_connect(fd, &address) == 0 || errno == EINPROGRESS);
            watch(fd, EPOLLIN | EPOLLRDHUP);
        }
        char all[4096];
        size_t n = 0;
        for (int line = 0; line < LINES || is_server; line++) {
            char one[100];
            if (!is_server) {
                size_t length = sprintf(one, "line %d of client %d\n", line, client);
                say(fd, line, one, length);
                for (size_t got = 0; got < length;)
                    got += said(fd, line, all + n + got, length - got);
                n += length;
                continue;
            }
            size_t length = said(fd, line, one, sizeof one);
            if (!length)
                break;
            CHECK(n + length < sizeof all);
            memcpy(all + n, one, length);
            n += length;
            say(fd, line, one, length);
        }
        if (!is_server)
            CHECK(shutdown(fd, SHUT_WR) == 0 && said(fd, client, all + n, 1) == 0);
        CHECK(do_close(fd) == 0);
        all[n] = 0;
        printf("%s", all);
    }
}
