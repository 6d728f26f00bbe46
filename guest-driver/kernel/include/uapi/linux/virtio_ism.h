/* SPDX-License-Identifier: ((GPL-2.0 WITH Linux-syscall-note) OR BSD-3-Clause) */
/*
 * Virtio ISM (Internal Shared Memory) device, revision 1.
 */
#ifndef _UAPI_LINUX_VIRTIO_ISM_H
#define _UAPI_LINUX_VIRTIO_ISM_H

#include <linux/types.h>

#define VIRTIO_ISM_REVISION	1

/* Feature bits */
#define VIRTIO_ISM_F_MOVE	0	/* the device copies */
#define VIRTIO_ISM_F_WINDOW	1	/* DMBs can lie in slabs of the window */
#define VIRTIO_ISM_F_SW_EVENT	2	/* software events */
#define VIRTIO_ISM_F_STATS	3	/* counters of the device */
#define VIRTIO_ISM_F_MASK	0xffffff /* the bits of the device's type */

/* Virtqueues */
#define VIRTIO_ISM_VQ_CONTROL	0
#define VIRTIO_ISM_VQ_EVENT	1
#define VIRTIO_ISM_VQ_MOVE	2	/* the first of them */

#define VIRTIO_ISM_GID_LEN	16

struct virtio_ism_config {
	__le32 revision;
	__le32 features;
	__u8 gid[VIRTIO_ISM_GID_LEN];
	__le16 chid;
	__le16 num_move_queues;
	__le32 max_dmbs;
	__le32 dmb_min;
	__le32 dmb_max;
	__le32 dmb_align;
	__le16 max_sg;
	__le16 max_segs;
	__le32 max_move;
	__le32 max_attach;
	__le32 max_peers;
	__le32 slab_align;
	__le64 window_size;
};

/* Operations of the control queue */
#define VIRTIO_ISM_OP_HELLO		1
#define VIRTIO_ISM_OP_QUERY_GID		16
#define VIRTIO_ISM_OP_REGISTER		32
#define VIRTIO_ISM_OP_UNREGISTER	33
#define VIRTIO_ISM_OP_ATTACH		34
#define VIRTIO_ISM_OP_DETACH		35
#define VIRTIO_ISM_OP_RELEASE_SLAB	36
#define VIRTIO_ISM_OP_SIGNAL_EVENT	48
#define VIRTIO_ISM_OP_STATS		64

/* Status of a command and of a move */
#define VIRTIO_ISM_S_OK			0
#define VIRTIO_ISM_S_EINVAL		1
#define VIRTIO_ISM_S_ENOENT		2
#define VIRTIO_ISM_S_ENOSPC		3
#define VIRTIO_ISM_S_ENOMEM		4
#define VIRTIO_ISM_S_EBUSY		5
#define VIRTIO_ISM_S_ENODEV		6
#define VIRTIO_ISM_S_ENOTSUP		7
#define VIRTIO_ISM_S_EIO		8
#define VIRTIO_ISM_S_EAGAIN		9
#define VIRTIO_ISM_S_ESTATE		10
#define VIRTIO_ISM_S_E2SMALL		11
#define VIRTIO_ISM_S_EORDER		12

struct virtio_ism_request {
	__le16 op;
	__le16 reserved;
	__le32 tag;
};

struct virtio_ism_reply {
	__le16 status;
	__le16 reserved;
	__le32 tag;
};

#define VIRTIO_ISM_HELLO_BIG_ENDIAN	1 /* the control words in this driver's DMBs */

struct virtio_ism_hello {
	__le16 abi;
	__le16 flags;
	__le32 driver_max_idx;
};

struct virtio_ism_hello_reply {
	__u8 gid[VIRTIO_ISM_GID_LEN];
	__le32 session;
	__le32 reserved;
};

struct virtio_ism_query_gid {
	__u8 gid[VIRTIO_ISM_GID_LEN];
	__le32 vid_valid;
	__le32 vid;
};

#define VIRTIO_ISM_GID_REACHABLE	1
#define VIRTIO_ISM_GID_WINDOW		2

struct virtio_ism_query_gid_reply {
	__le32 flags;
	__le32 reserved;
};

#define VIRTIO_ISM_BACKING_GUEST	1
#define VIRTIO_ISM_BACKING_WINDOW	2

struct virtio_ism_sg {
	__le64 gpa;
	__le32 len;
	__le32 reserved;
};

struct virtio_ism_register {
	__u8 user_gid[VIRTIO_ISM_GID_LEN];
	__le32 idx;
	__le32 len;
	__le16 backing;
	__le16 wait_group;
	__le32 nsg;
	__le64 reserved;
	/* struct virtio_ism_sg follow */
};

struct virtio_ism_register_reply {
	__le64 token;
	__le64 dmb_off;
	__le64 slab_off;
	__le32 slab_len;
	__le32 slab_id;
	__le16 line;
	__u8 bit;
	__u8 flags;
	__le32 reserved;
	__le64 nonce;
};

struct virtio_ism_token {
	__le64 token;
};

#define VIRTIO_ISM_ATTACH_MOVE_ONLY	1 /* the DMB cannot be mapped */

struct virtio_ism_attach_reply {
	__le64 dmb_off;
	__le64 slab_off;
	__le32 slab_len;
	__le32 slab_id;
	__le32 dmb_len;
	__le16 line;
	__u8 bit;
	__u8 flags;
	__le64 nonce;
	__u8 owner_gid[VIRTIO_ISM_GID_LEN];
	__le64 reserved;
};

struct virtio_ism_release_slab {
	__le32 slab_id;
	__le32 reserved;
};

struct virtio_ism_signal_event {
	__u8 gid[VIRTIO_ISM_GID_LEN];
	__le32 trigger;
	__le32 code;
	__le64 info;
	__le64 reserved;
};

#define VIRTIO_ISM_STATS		16

struct virtio_ism_stats {
	__le64 counters[VIRTIO_ISM_STATS];
};

/* Move queues */
#define VIRTIO_ISM_MOVE_SIGNAL		1

struct virtio_ism_move {
	__le64 token;
	__le16 nseg;
	__le16 flags;
	__le16 mask;
	__le16 reserved0;
	__le32 total;
	__le32 reserved1;
	/* struct virtio_ism_segment and the payload follow */
};

struct virtio_ism_segment {
	__le32 offset;
	__le32 len;
};

/* Records of the event queue */
#define VIRTIO_ISM_EVENT_LEN		64

#define VIRTIO_ISM_EV_DMB_SIGNAL	1
#define VIRTIO_ISM_EV_SLAB_WAKE		2
#define VIRTIO_ISM_EV_DMB_GONE		3
#define VIRTIO_ISM_EV_PEER_DOWN		4
#define VIRTIO_ISM_EV_SW_EVENT		5
#define VIRTIO_ISM_EV_LOST		6

struct virtio_ism_event {
	__le16 kind;
	__le16 subtype;
	__le32 n;
};

struct virtio_ism_notice {
	struct virtio_ism_event event;
	__u8 gid[VIRTIO_ISM_GID_LEN];
	__le64 token;
	__le64 info;
	__le32 code;
	__le32 reserved0;
	__le64 time_ns;
	__le64 reserved1;
};

#define VIRTIO_ISM_DMB_SIGNALS		7

struct virtio_ism_dmb_signal {
	struct virtio_ism_event event;
	struct {
		__le32 idx;
		__le16 mask;
		__le16 reserved;
	} entries[VIRTIO_ISM_DMB_SIGNALS];
};

#define VIRTIO_ISM_SLAB_WAKES		14

struct virtio_ism_slab_wake {
	struct virtio_ism_event event;
	__le32 slabs[VIRTIO_ISM_SLAB_WAKES];
};

/* The window: shared memory region 1 */
#define VIRTIO_ISM_SHM_WINDOW		1

/* The end of a slab, behind its DMBs */
#define VIRTIO_ISM_CONTROL_LEN		65536
#define VIRTIO_ISM_LINES		1020

struct virtio_ism_control {
	__le64 nonce;
	__le32 version;
	__le32 nlines;
};

/* Line i is 64 * (i + 1) bytes behind the start of the control tail */
struct virtio_ism_line {
	__le32 armed;
	__le32 reserved0;
	__le64 pend;
	__u8 reserved1[48];
};

#define VIRTIO_ISM_ARMED_KICK		1 /* in armed: the owner waits for a kick */

#endif /* _UAPI_LINUX_VIRTIO_ISM_H */
