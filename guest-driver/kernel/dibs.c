// SPDX-License-Identifier: GPL-2.0
/*
 * Virtio ISM driver: the device as dibs and its clients see it.
 */
#include <linux/bitmap.h>
#include <linux/bitops.h>
#include <linux/ktime.h>
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/slab.h>

#include "vism.h"

/* SMC asks for this VLAN to learn whether a device can do SMC-Dv2. */
#define VISM_NO_VLAN		0x1fff
/* When clients are told for the second time that a peer has gone, and how rarely later. */
#define VISM_TELL_FIRST		HZ
#define VISM_TELL_RARELY	(32 * HZ)

static u16 vism_get_fabric_id(struct dibs_dev *dibs)
{
	struct vism *ism = dibs->drv_priv;

	return ism->limits.chid;
}

/* Whether a peer is on the fabric for sure: it may write a DMB, and its end was not announced. */
static bool vism_knows_peer(struct vism *ism, const uuid_t *gid)
{
	struct vism_dmb *dmb;

	guard(spinlock_irqsave)(&ism->dmb_lock);
	list_for_each_entry(dmb, &ism->dmbs, list)
		if (!dmb->peer_down && uuid_equal(&dmb->user, gid))
			return true;
	return false;
}

static int vism_query_remote_gid(struct dibs_dev *dibs, const uuid_t *gid,
				 u32 vid_valid, u32 vid)
{
	struct vism *ism = dibs->drv_priv;

	if (vism_usable(ism) && vism_knows_peer(ism, gid))
		return 0;
	return vism_query_gid(ism, gid);
}

static int vism_max_dmbs(void)
{
	return VISM_MAX_DMBS;
}

/* Takes an index: the one that the client wants, if any. */
static int vism_take_idx(struct vism *ism, u32 wanted)
{
	u32 idx = wanted;

	guard(spinlock_irqsave)(&ism->dmb_lock);
	if (!wanted)
		idx = find_first_zero_bit(ism->idx_map, ism->limits.max_dmbs);
	if (idx >= ism->limits.max_dmbs)
		return wanted ? -EINVAL : -ENOSPC;
	if (test_and_set_bit(idx, ism->idx_map))
		return -EEXIST;
	return idx;
}

static void vism_set_client(struct dibs_dev *dibs, u32 idx, u8 client)
{
	guard(spinlock_irqsave)(&dibs->lock);
	dibs->dmb_clientid_arr[idx] = client;
}

/* Frees a DMB that the device does not access. */
static void vism_free_dmb(struct vism *ism, struct vism_dmb *dmb)
{
	folio_put(dmb->folio);
	clear_bit(dmb->idx, ism->idx_map);
	kfree(dmb);
}

/* Frees a DMB that is in no list, once the device does not access it any more. */
static void vism_let_go(struct vism *ism, struct vism_dmb *dmb, int rc)
{
	if (rc == -EIO || rc == -ETIMEDOUT || rc == -EPROTO) {
		guard(spinlock_irqsave)(&ism->dmb_lock);
		if (ism->running) {
			list_add(&dmb->list, &ism->orphans);
			return;
		}
	}
	vism_free_dmb(ism, dmb);
}

/**
 * vism_free_orphans() - free DMBs whose end the device has not confirmed
 * @ism: device, which was reset
 */
void vism_free_orphans(struct vism *ism)
{
	struct vism_dmb *dmb, *next;
	LIST_HEAD(orphans);

	scoped_guard(spinlock_irqsave, &ism->dmb_lock)
		list_splice_init(&ism->orphans, &orphans);
	list_for_each_entry_safe(dmb, next, &orphans, list)
		vism_free_dmb(ism, dmb);
}

/* Registers a DMB in guest memory. If that fails, it is freed as soon as that may be. */
static int vism_register_guest(struct vism *ism, struct vism_dmb *own)
{
	int rc;

	/* One piece: SMC takes the page of cpu_addr. A failure makes it ask for less. */
	own->folio = folio_alloc(GFP_KERNEL | __GFP_ZERO | __GFP_NOWARN |
				 __GFP_NOMEMALLOC | __GFP_NORETRY,
				 get_order(own->len));
	if (!own->folio) {
		clear_bit(own->idx, ism->idx_map);
		kfree(own);
		return -ENOMEM;
	}
	own->addr = folio_address(own->folio);
	rc = vism_register(ism, own);
	if (rc)
		vism_let_go(ism, own, rc);
	return rc;
}

/* Ends a DMB that is in no list. */
static void vism_end_dmb(struct dibs_dev *dibs, struct vism_dmb *own)
{
	struct vism *ism = dibs->drv_priv;
	int rc;

	if (own->slab) {
		vism_set_client(dibs, own->idx, NO_DIBS_CLIENT);
		vism_window_unregister(ism, own);
		return;
	}
	rc = vism_unregister(ism, own->token);
	vism_set_client(dibs, own->idx, NO_DIBS_CLIENT);
	/* Any other status is nonsense here, and says that the DMB is still there. */
	if (rc && rc != -ENOENT && rc != -ESTALE)
		rc = -EIO;
	vism_let_go(ism, own, rc);
}

static int vism_register_dmb(struct dibs_dev *dibs, struct dibs_dmb *dmb,
			     struct dibs_client *client)
{
	struct vism *ism = dibs->drv_priv;
	struct vism_dmb *own;
	bool gone;
	u32 idx;
	int rc;

	if (!is_power_of_2(dmb->dmb_len) || dmb->dmb_len < ism->limits.dmb_min ||
	    dmb->dmb_len > ism->limits.dmb_max)
		return -EINVAL;
	own = kzalloc_obj(*own);
	if (!own)
		return -ENOMEM;
	own->len = dmb->dmb_len;
	own->user = dmb->rgid;
	rc = vism_take_idx(ism, dmb->idx);
	if (rc < 0) {
		kfree(own);
		return rc;
	}
	idx = rc;
	own->idx = idx;
	/* Before the device knows it: the first signal may come at once. */
	vism_set_client(dibs, idx, client->id);
	/* The device may have no window, or no room there, or the peer may have none. */
	rc = vism_window_register(ism, own);
	if (rc)
		rc = vism_register_guest(ism, own);
	if (rc) {
		vism_set_client(dibs, idx, NO_DIBS_CLIENT);
		return rc;
	}
	dmb->idx = idx;
	dmb->dmb_tok = own->token;
	dmb->cpu_addr = own->addr;
	/* SMC unregisters no DMB whose address is 0. */
	dmb->dma_addr = page_to_phys(virt_to_page(own->addr)) ?: DMA_MAPPING_ERROR;
	/* From here on the end of its user is told by this list. It may have come before. */
	scoped_guard(spinlock_irqsave, &ism->dmb_lock) {
		gone = vism_has_left(ism, &own->user);
		if (!gone)
			list_add(&own->list, &ism->dmbs);
	}
	if (gone) {
		vism_end_dmb(dibs, own);
		return -ENODEV;
	}
	return 0;
}

/* Takes a DMB out of the list. */
static struct vism_dmb *vism_take_dmb(struct vism *ism,
				      const struct dibs_dmb *dmb)
{
	struct vism_dmb *own;

	guard(spinlock_irqsave)(&ism->dmb_lock);
	list_for_each_entry(own, &ism->dmbs, list) {
		if (own->idx == dmb->idx && own->token == dmb->dmb_tok) {
			list_del(&own->list);
			return own;
		}
	}
	return NULL;
}

static int vism_unregister_dmb(struct dibs_dev *dibs, struct dibs_dmb *dmb)
{
	struct vism_dmb *own;

	own = vism_take_dmb(dibs->drv_priv, dmb);
	if (!own)
		return -EINVAL;
	vism_end_dmb(dibs, own);
	return 0;
}

static int vism_move_data(struct dibs_dev *dibs, u64 token, unsigned int idx,
			  bool sf, unsigned int offset, void *data,
			  unsigned int size)
{
	u16 mask = ror16(VISM_FIRST_MASK, idx);
	struct vism *ism = dibs->drv_priv;
	int rc;

	rc = vism_window_move(ism, token, mask, sf, offset, data, size);
	if (rc != -EOPNOTSUPP)
		return rc;
	return vism_move(ism, token, mask, sf, offset, data, size);
}

static int vism_add_vlan_id(struct dibs_dev *dibs, u64 vlan_id)
{
	return vlan_id == VISM_NO_VLAN ? 0 : -EOPNOTSUPP;
}

static int vism_del_vlan_id(struct dibs_dev *dibs, u64 vlan_id)
{
	return 0;
}

static int vism_signal_remote(struct dibs_dev *dibs, const uuid_t *gid,
			      u32 trigger, u32 code, u64 info)
{
	struct vism *ism = dibs->drv_priv;

	if (!vism_has_feature(ism, VIRTIO_ISM_F_SW_EVENT))
		return -EOPNOTSUPP;
	return vism_signal_event(ism, gid, trigger, code, info);
}

static const struct dibs_dev_ops vism_dibs_ops = {
	.get_fabric_id = vism_get_fabric_id,
	.query_remote_gid = vism_query_remote_gid,
	.max_dmbs = vism_max_dmbs,
	.register_dmb = vism_register_dmb,
	.unregister_dmb = vism_unregister_dmb,
	.move_data = vism_move_data,
	.add_vlan_id = vism_add_vlan_id,
	.del_vlan_id = vism_del_vlan_id,
	.signal_event = vism_signal_remote,
};

/**
 * vism_call_irq() - tell the client of a DMB that it was signalled
 * @dibs: device, locked
 * @idx: of the DMB, below VISM_MAX_DMBS
 * @mask: what was signalled
 */
void vism_call_irq(struct dibs_dev *dibs, u32 idx, u16 mask)
{
	struct dibs_client *client;
	u8 id;

	lockdep_assert_held(&dibs->lock);
	/* A device may signal before dibs_dev_add() has made the table. */
	if (!READ_ONCE(dibs->dmb_clientid_arr))
		return;
	id = dibs->dmb_clientid_arr[idx];
	client = id < MAX_DIBS_CLIENTS ? dibs->subs[id] : NULL;
	if (client)
		client->ops->handle_irq(dibs, idx, mask);
}

static void vism_call_event(struct dibs_dev *dibs, const struct dibs_event *event)
{
	lockdep_assert_held(&dibs->lock);
	for (int i = 0; i < MAX_DIBS_CLIENTS; i++)
		if (dibs->subs[i])
			dibs->subs[i]->ops->handle_event(dibs, event);
}

/**
 * vism_dibs_signal() - tell the client of a DMB that it was signalled
 * @ism: device
 * @idx: of the DMB, as the device says
 * @mask: as the device says
 */
void vism_dibs_signal(struct vism *ism, u32 idx, u16 mask)
{
	guard(spinlock_irqsave)(&ism->dmb_lock);
	if (!ism->dibs || idx >= VISM_MAX_DMBS)
		return;
	guard(spinlock)(&ism->dibs->lock);
	vism_call_irq(ism->dibs, idx, mask);
}

/**
 * vism_dibs_event() - tell all clients of an event
 * @ism: device
 * @event: what they are told
 */
void vism_dibs_event(struct vism *ism, const struct dibs_event *event)
{
	guard(spinlock_irqsave)(&ism->dmb_lock);
	if (!ism->dibs)
		return;
	guard(spinlock)(&ism->dibs->lock);
	vism_call_event(ism->dibs, event);
}

/**
 * vism_peer_left() - remember that a peer has gone
 * @ism: device
 * @gid: of the peer, which never comes back
 */
void vism_peer_left(struct vism *ism, const uuid_t *gid)
{
	guard(spinlock_irqsave)(&ism->dmb_lock);
	ism->left[ism->next_left] = *gid;
	ism->next_left = (ism->next_left + 1) % VISM_LEFT;
}

/**
 * vism_has_left() - whether a peer has gone lately
 * @ism: device, whose DMBs are locked
 * @gid: of the peer
 *
 * Return: true if it is one of the last that have.
 */
bool vism_has_left(struct vism *ism, const uuid_t *gid)
{
	lockdep_assert_held(&ism->dmb_lock);
	for (int i = 0; i < VISM_LEFT; i++)
		if (uuid_equal(&ism->left[i], gid))
			return true;
	return false;
}

/**
 * vism_dibs_peer_down() - tell all clients that a peer has gone
 * @ism: device
 * @event: what they are told
 *
 * The device folds what the peer had signalled before into this, so its DMBs are signalled first.
 */
void vism_dibs_peer_down(struct vism *ism, struct dibs_event *event)
{
	struct vism_dmb *dmb;

	guard(spinlock_irqsave)(&ism->dmb_lock);
	if (!ism->dibs)
		return;
	guard(spinlock)(&ism->dibs->lock);
	list_for_each_entry(dmb, &ism->dmbs, list) {
		if (!uuid_equal(&dmb->user, &event->gid))
			continue;
		dmb->peer_down = true;
		vism_call_irq(ism->dibs, dmb->idx, VISM_FIRST_MASK);
		ism->tell_delay = VISM_TELL_FIRST;
		mod_delayed_work(system_dfl_wq, &ism->tell, ism->tell_delay);
	}
	vism_call_event(ism->dibs, event);
}

/* Tells clients again of one peer that has gone. Returns false if this round has no more. */
static bool vism_tell_next(struct vism *ism)
{
	struct dibs_event event = {
		.type = DIBS_DEV_EVENT,
		.subtype = DIBS_DEV_ERR_STATE,
		.time = ktime_get_ns(),
	};
	struct vism_dmb *dmb;
	bool found = false;

	guard(spinlock_irqsave)(&ism->dmb_lock);
	if (!ism->dibs)
		return false;
	list_for_each_entry(dmb, &ism->dmbs, list) {
		if (!dmb->peer_down || dmb->round == ism->tell_round)
			continue;
		if (!found)
			event.gid = dmb->user;
		found = true;
		if (uuid_equal(&dmb->user, &event.gid))
			dmb->round = ism->tell_round;
	}
	if (!found)
		return false;
	guard(spinlock)(&ism->dibs->lock);
	vism_call_event(ism->dibs, &event);
	return true;
}

/**
 * vism_tell_again() - tell clients again that peers have gone, while they keep DMBs for them
 * @work: of a device
 *
 * SMC drops what it is told if it finds no memory for it, and dibs does while a client gets the
 * device. Who waits for a peer would wait for ever.
 */
void vism_tell_again(struct work_struct *work)
{
	struct vism *ism = container_of(work, struct vism, tell.work);
	bool told = false;

	ism->tell_round++;
	while (vism_tell_next(ism))
		told = true;
	if (!told)
		return;
	guard(spinlock_irqsave)(&ism->dmb_lock);
	ism->tell_delay = min(2 * ism->tell_delay, VISM_TELL_RARELY);
	queue_delayed_work(system_dfl_wq, &ism->tell, ism->tell_delay);
}

/**
 * vism_dibs_add() - give dibs a device for the session
 * @ism: device, whose session has begun
 *
 * Return: 0 or an error number.
 */
int vism_dibs_add(struct vism *ism)
{
	struct virtio_device *vdev = ism->vdev;
	struct dibs_dev *dibs;
	struct vism_dmb *dmb;
	int rc;

	dibs = dibs_dev_alloc();
	if (!dibs)
		return -ENOMEM;
	dibs->ops = &vism_dibs_ops;
	dibs->drv_priv = ism;
	dibs->gid = ism->gid;
	/* SMC takes it for a PCI device, which it is but for transports of tests. */
	dibs->dev.parent = vdev->dev.parent;
	rc = dev_set_name(&dibs->dev, "ism-%s", dev_name(&vdev->dev));
	if (rc)
		goto put;
	/* Clients register DMBs, and events come, before dibs_dev_add() returns. */
	scoped_guard(spinlock_irqsave, &ism->dmb_lock)
		ism->dibs = dibs;
	rc = dibs_dev_add(dibs);
	if (rc)
		goto clear;
	/* Clients could use the device a little before they were told what happens there. */
	scoped_guard(spinlock_irqsave, &ism->dmb_lock) {
		guard(spinlock)(&dibs->lock);
		list_for_each_entry(dmb, &ism->dmbs, list)
			vism_call_irq(dibs, dmb->idx, VISM_FIRST_MASK);
	}
	return 0;
clear:
	scoped_guard(spinlock_irqsave, &ism->dmb_lock)
		ism->dibs = NULL;
put:
	put_device(&dibs->dev);
	return rc;
}

/**
 * vism_dibs_del() - take the device from dibs
 * @ism: device, which may have failed
 *
 * Context: process. Waits until clients have ended all connections.
 */
void vism_dibs_del(struct vism *ism)
{
	struct dibs_dev *dibs = ism->dibs;

	if (!dibs)
		return;
	dibs_dev_del(dibs);
	scoped_guard(spinlock_irqsave, &ism->dmb_lock)
		ism->dibs = NULL;
	put_device(&dibs->dev);
}
