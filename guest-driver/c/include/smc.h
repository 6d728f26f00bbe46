/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * Sockets of SMC (Shared Memory Communications, RFC 7609 and SMCv2.1) for programs in C.
 *
 * A connection begins as TCP. If both ends speak SMC and have a device in common, bytes then travel
 * through shared memory (SMC-D) or by RDMA (SMC-R); if not, the connection stays TCP. smc_get_info
 * says which, and why. The calls behave like the socket calls whose names they have.
 *
 * Link with -lsmc (pkg-config --cflags --libs smc).
 *
 * Errors. A call that fails returns -1 (or NULL, where it returns a pointer) and sets errno.
 * smc_last_error has the same in words, with the value that was wrong. Every call that takes a pointer
 * refuses NULL with EINVAL, unless its comment allows it. No call raises SIGPIPE.
 *
 * Threads. Any number of threads may use a stack or a socket at the same time, and two threads may
 * read and write one socket. smc_close and smc_stack_close are the exception, as free(3) is: no other
 * thread may be in a call with that pointer, or make one afterwards. To end a call that waits in
 * another thread, use smc_shutdown. A stack has threads of its own, which wait for its devices. They
 * inherit the signal mask of the thread that calls smc_stack_open.
 *
 * Signals. A signal handler without SA_RESTART ends a call of smc_send or smc_recv that waits, with
 * EINTR. One with SA_RESTART may do so, too. No call may be made in a signal handler.
 *
 * Forks. A stack and its sockets belong to the process that made them. In the child of fork(2), calls
 * with them fail with EBADF, apart from smc_close and smc_stack_close, which do nothing there. The
 * child may open a stack of its own. What a child has inherited closes when it ends or calls
 * execve(2).
 *
 * Descriptors. Those of a stack and its sockets are its own. A program that closes all descriptors from
 * a number on (closefrom, close_range, as daemons do at their start) does so before it opens a stack:
 * afterwards the sockets fail, and smc_close and smc_stack_close may take some seconds each, for they
 * wait for a device in vain, and leave a thread behind.
 *
 * Defects. Nothing unwinds into the caller. If the library finds a defect in itself, it aborts the
 * process (SIGABRT), because what it knows of shared memory may be wrong then, and bytes could be lost
 * without a word.
 */
#ifndef SMC_H
#define SMC_H

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The devices, peers and configuration of a process. One is enough for all of its sockets. */
typedef struct smc_stack smc_stack;
/* A connection, or a listening socket. */
typedef struct smc_socket smc_socket;

/* ---- Errors and versions ------------------------------------------------------------------- */

/* Why the last call that failed in this thread did so, in English; "" if none has. Valid until the
 * next call that fails in this thread. Does not change errno. */
const char *smc_last_error(void);

/* The version of the library, such as "0.1.0". */
const char *smc_version(void);

/* ---- Stacks -------------------------------------------------------------------------------- */

/* How peers that speak SMC are found: `rendezvous` of struct smc_options. */
enum {
	/* Not at all: every server that smc_connect connects to has to speak SMC, since another one would
	 * take the handshake for data. Servers recognise SMC clients by their first bytes. */
	SMC_RENDEZVOUS_OFF = 0,
	/* By TCP option 254 (eBPF), if this process has CAP_BPF and CAP_NET_ADMIN, else as OFF. */
	SMC_RENDEZVOUS_AUTO = 1,
	/* By TCP option 254; if this process may not use it, all connections are TCP. */
	SMC_RENDEZVOUS_REQUIRED = 2
};

/* Settings of a stack. Begin with SMC_OPTIONS_INIT, which has the defaults. Later versions may add
 * fields at the end; `size` says which ones the program knows. */
struct smc_options {
	/* sizeof(struct smc_options). */
	size_t size;
	/* User EIDs (enterprise ids, up to 32 characters of A-Z, 0-9, '-' and '.'), with commas between
	 * them. Both ends need one in common. NULL: "VIRTIO-ISM". */
	const char *eids;
	/* RNICs for SMC-R, such as "mlx5_0/1", with commas between them; "none": no SMC-R; NULL: all. */
	const char *rnics;
	/* A directory in which the stack opens a socket that answers "smc stat"; NULL: it does not. */
	const char *statistics;
	/* Receive buffer of a connection, bytes: a power of two from 16384 to 1048576; 0: 65536. */
	uint32_t recv_buffer;
	/* How long a call that waits looks at shared memory before it sleeps, microseconds; 0: not at all;
	 * -1: 50. */
	int32_t spin_us;
	/* How long smc_stack_open waits for a device that another process uses, milliseconds; -1: 10000. */
	int32_t device_timeout_ms;
	/* How long a server waits for the first bytes of a client, before it takes it for one without SMC,
	 * milliseconds; -1: 200. */
	int32_t detect_timeout_ms;
	/* SMC_RENDEZVOUS_OFF, _AUTO or _REQUIRED. */
	int32_t rendezvous;
	/* 0. */
	uint32_t reserved;
};

#define SMC_OPTIONS_INIT \
	{ sizeof(struct smc_options), NULL, NULL, NULL, 0, -1, -1, -1, SMC_RENDEZVOUS_OFF, 0 }

/* Opens a stack with one device.
 *
 * `device` is a socket of vhost-device-ism (that of a device or of a device pool), in a virtual machine
 * the PCI address of a device ("0000:00:04.0") or "pci" for any that is free, or "none": no SMC-D.
 * `options` may be NULL: the defaults.
 *
 * If the device disappears later, connections of SMC-D fail, and the stack opens it again when a
 * connection is made or accepted. Until it is back, connections are TCP.
 *
 * Returns the stack, for smc_stack_close. Errors:
 *   EINVAL  a field of `options` has a value that it cannot have
 *   E2BIG   `options` has fields that this library does not know, and they are not zero
 *   EBUSY   other processes use the device
 *   ENODEV  there is no such device, this process may not use it, or it does not answer
 *   EMFILE, ENFILE, ENOMEM, EAGAIN  no descriptors, memory or threads are left */
smc_stack *smc_stack_open(const char *device, const struct smc_options *options);

/* Gives up a stack. Sockets that are open keep what they need. NULL: nothing happens. */
void smc_stack_close(smc_stack *stack);

/* ---- Sockets ------------------------------------------------------------------------------- */

/* Connects to a server that speaks SMC, on a name or an address ("::1", "fe80::1%eth0") and a port.
 *
 * If SMC does not work out, the connection is TCP. An ordinary TCP server would take the handshake for
 * data, unless `rendezvous` is on: use smc_connect_tcp for those. The call waits for TCP and the
 * handshake, at most `timeout_ms` milliseconds; -1: as long as both take (the handshake: 6 s for each
 * message of the server).
 *
 * Returns a blocking socket, for smc_close. Errors:
 *   EINVAL     the port is 0, or the time-out is less than -1
 *   ENOENT     the name has no address (smc_last_error has what the resolver says)
 *   ETIMEDOUT  the time-out has passed, or the server has not answered the handshake
 *   ECONNREFUSED, ENETUNREACH, EHOSTUNREACH, ...  those of connect(2)
 *   ECONNRESET, EPROTO  the handshake broke the connection */
smc_socket *smc_connect(smc_stack *stack, const char *host, uint16_t port, int timeout_ms);

/* As smc_connect, without SMC: the connection is TCP. */
smc_socket *smc_connect_tcp(smc_stack *stack, const char *host, uint16_t port, int timeout_ms);

/* Listens on an address of this host ("0.0.0.0" or "::" for all of them) and a port; 0: one that is
 * free, which smc_getsockname tells. Clients with SMC and those without it are accepted.
 *
 * Returns a blocking socket, for smc_accept and smc_close. Errors: ENOENT as smc_connect; EADDRINUSE,
 * EADDRNOTAVAIL, EACCES, ...: those of bind(2) and listen(2). */
smc_socket *smc_listen(smc_stack *stack, const char *host, uint16_t port);

/* Takes the next connection of a listening socket. Handshakes that fail are counted, and the listener
 * goes on with the next client. A signal handler does not end the call.
 *
 * Returns a blocking socket, for smc_close. Errors:
 *   EINVAL  the socket does not listen, or no longer: another thread may call smc_shutdown to end
 *           calls that wait
 *   EAGAIN  the socket is non-blocking and there is no connection yet
 *   EMFILE, ENFILE, ENOMEM, ...  those of accept(2) */
smc_socket *smc_accept(smc_socket *listener);

/* Closes a socket: it can no longer be used. What was sent still reaches the peer; if bytes that have
 * arrived were not read, the peer's next call fails with ECONNRESET. NULL: nothing happens. */
void smc_close(smc_socket *socket);

/* Ends one direction of a connection (SHUT_RD, SHUT_WR) or both (SHUT_RDWR), and wakes calls that wait.
 * Of a listening socket, SHUT_RD and SHUT_RDWR end listening, as on Linux: smc_accept fails with EINVAL,
 * and clients are refused; SHUT_WR does nothing.
 *
 * Returns 0. Errors: EINVAL: `how` is another value; ENOTCONN: the connection, or listening, has ended. */
int smc_shutdown(smc_socket *socket, int how);

/* ---- Bytes --------------------------------------------------------------------------------- */

/* Sends bytes, as send(2): a blocking socket waits until all of them are on their way.
 *
 * `flags`: MSG_DONTWAIT; MSG_OOB (the last byte is urgent); MSG_NOSIGNAL and MSG_MORE change nothing.
 *
 * Returns the number of bytes that were taken, which may be less than `len` if the socket is
 * non-blocking, or if a time-out, a signal or an error comes in the middle. Errors:
 *   EAGAIN      nothing can be sent now (non-blocking, MSG_DONTWAIT, or SO_SNDTIMEO has passed)
 *   EINTR       a signal handler ran
 *   EPIPE       this end has shut down its direction, or the peer has closed
 *   ECONNRESET, ECONNABORTED  the connection has failed
 *   ENOTCONN    the socket listens
 *   EOPNOTSUPP  other flags
 *   EINVAL      `len` is larger than SSIZE_MAX */
ssize_t smc_send(smc_socket *socket, const void *buf, size_t len, int flags);

/* Receives bytes, as recv(2): waits until there is at least one.
 *
 * `flags`: MSG_DONTWAIT; MSG_PEEK (the bytes stay); MSG_WAITALL; MSG_OOB (the urgent byte).
 *
 * Returns the number of bytes; 0: the peer has ended its direction and all of its bytes were read, or
 * `len` is 0. Errors:
 *   EAGAIN      nothing has arrived (non-blocking, MSG_DONTWAIT, or SO_RCVTIMEO has passed)
 *   EINTR       a signal handler ran
 *   ECONNRESET, ECONNABORTED  the connection has failed
 *   ENOTCONN    the socket listens
 *   EOPNOTSUPP  other flags
 *   EINVAL      `len` is larger than SSIZE_MAX; MSG_OOB without an urgent byte */
ssize_t smc_recv(smc_socket *socket, void *buf, size_t len, int flags);

/* As smc_send and smc_recv, of `count` pieces. EINVAL also: `count` is less than 0 or more than 1024,
 * or a piece of some length is at NULL. */
ssize_t smc_sendv(smc_socket *socket, const struct iovec *iov, int count, int flags);
ssize_t smc_recvv(smc_socket *socket, const struct iovec *iov, int count, int flags);

/* ---- Readiness ----------------------------------------------------------------------------- */

/* Whether calls return EAGAIN instead of waiting. It is a property of the socket and not of a
 * descriptor, so fcntl(2) does not change it. Returns 0. Errors: none but those of all calls. */
int smc_set_nonblocking(smc_socket *socket, int nonblocking);

/* 1: non-blocking; 0: blocking. */
int smc_get_nonblocking(smc_socket *socket);

/* A descriptor for poll(2), select(2) and epoll(7), level or edge triggered: POLLIN when a receive or
 * accept has something to do, POLLOUT when a send has. After POLLIN on a listening socket smc_accept
 * may return EAGAIN: a handshake has made a step.
 *
 * The descriptor belongs to the socket: it stays the same until smc_close, and must not be read,
 * written, changed or closed. Make the socket non-blocking before you wait.
 *
 * Errors: EMFILE, ENFILE: no descriptors are left. */
int smc_fd(smc_socket *socket);

/* ---- Addresses and options ----------------------------------------------------------------- */

/* The address of this end, as getsockname(2): `*len` is the size of `addr` before, and that of the
 * address after. Returns 0. Errors: those of getsockname(2). */
int smc_getsockname(smc_socket *socket, struct sockaddr *addr, socklen_t *len);

/* The address of the peer, as getpeername(2). Returns 0. Errors: ENOTCONN: the socket listens, or the
 * connection has ended. */
int smc_getpeername(smc_socket *socket, struct sockaddr *addr, socklen_t *len);

/* Sets an option of a connection, as setsockopt(2). Returns 0.
 *
 *   SOL_SOCKET:  SO_RCVTIMEO, SO_SNDTIMEO (struct timeval; zero: no time-out)
 *                SO_LINGER (struct linger), SO_KEEPALIVE, SO_OOBINLINE (int)
 *   IPPROTO_TCP: TCP_NODELAY (int; SMC sends everything at once in any case)
 *
 * Errors: ENOPROTOOPT: another option; EINVAL: `len` is too small; EDOM: a time cannot be so; ENOTCONN:
 * the socket listens. */
int smc_setsockopt(smc_socket *socket, int level, int name, const void *value, socklen_t len);

/* Reads an option of a connection, as getsockopt(2): SO_RCVTIMEO, SO_SNDTIMEO, SO_KEEPALIVE,
 * TCP_NODELAY, and SO_ERROR: the pending error, once. Returns 0. Errors as smc_setsockopt. */
int smc_getsockopt(smc_socket *socket, int level, int name, void *value, socklen_t *len);

/* ---- What carries a connection ------------------------------------------------------------- */

/* `carrier` of struct smc_info. */
enum {
	/* TCP; `reason` says why. */
	SMC_CARRIER_TCP = 0,
	/* SMC-D: shared memory. */
	SMC_CARRIER_SMCD = 1,
	/* SMC-R: RDMA. */
	SMC_CARRIER_SMCR = 2
};

/* What was negotiated for a connection. Later versions may add fields at the end. */
struct smc_info {
	/* SMC_CARRIER_TCP, _SMCD or _SMCR. */
	int32_t carrier;
	/* TCP: why, as the number that a Decline has in Linux (0x03010000: the peer does not speak SMC,
	 * 0x03030000: no device, ...). 0 for SMC. */
	uint32_t reason;
	/* Version of SMC: 1 or 2; 0 for TCP. */
	uint8_t version;
	/* Release of version 2: 0 for v2.0, 1 for v2.1. */
	uint8_t release;
	/* 1: this connection made the logical link or link group (first contact). */
	uint8_t first_contact;
	/* SMC-D: 1: this end stores into the peer's buffer; 0: the device moves the bytes. */
	uint8_t window;
	/* Bytes of the receive buffers of this end and of the peer; 0 for TCP. */
	uint32_t local_buffer;
	uint32_t peer_buffer;
};

/* What carries a connection. `size` is sizeof(struct smc_info): of a larger one, what this library does
 * not know is set to zero. Returns 0. Errors: EINVAL: `size` is too small; ENOTCONN: the socket
 * listens. */
int smc_get_info(smc_socket *socket, struct smc_info *info, size_t size);

/* The same in words, such as "SMC-D v2.1 over fabric ff00, ..." or "TCP (no virtio-ism device: ...)".
 * As snprintf(3), it writes at most `size` bytes with the final zero, and returns the length of the
 * whole text. `buf` may be NULL if `size` is 0. Errors: ENOTCONN: the socket listens. */
int smc_info_text(smc_socket *socket, char *buf, size_t size);

#ifdef __cplusplus
}
#endif

#endif
